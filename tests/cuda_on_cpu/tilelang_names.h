// The atomics and tl:: helpers that TileLang's generated code calls, spelled in terms of cuda_names.h.
#pragma once
#include "cuda_names.h"

// ---- atomics ----

// Fibers never interrupt each other inside one, so reading and writing is atomic. Forms that return a value let the
// others run first: they are what kernels poll with.
template <class T, class Op> static inline T emu_atomic(T* p, Op op, bool polls) {
  if (polls) emu::give_way();
  T old = *p;
  *p = op(old);
  return old;
}
#define EMU_ATOMIC(cuda, tile, expression)                                                    \
  template <class T, class V> static inline T cuda(T* p, V v) {                               \
    return emu_atomic(p, [&](T old) { return T(expression); }, true);                         \
  }                                                                                           \
  template <class T, class V> static inline void tile(T* p, V v, int = 0) {                   \
    emu_atomic(p, [&](T old) { return T(expression); }, false);                               \
  }                                                                                           \
  template <class T, class V> static inline T tile##Ret(T* p, V v, int = 0) { return cuda(p, v); }
EMU_ATOMIC(atomicAdd, AtomicAdd, old + T(v))
EMU_ATOMIC(atomicMax, AtomicMax, old < T(v) ? T(v) : old)
EMU_ATOMIC(atomicMin, AtomicMin, T(v) < old ? T(v) : old)
EMU_ATOMIC(atomicOr, AtomicOr, old | T(v))
EMU_ATOMIC(atomicExch, AtomicExch, v)
EMU_ATOMIC(atomicInc, AtomicInc, old >= T(v) ? 0 : old + 1)
template <class T> static inline T atomicCAS(T* p, T expected, T v) {
  return emu_atomic(p, [&](T old) { return old == expected ? v : old; }, true);
}
template <class T> static inline T AtomicLoad(T* p, int = 0) { return emu_atomic(p, [](T v) { return v; }, true); }
template <class T, class V> static inline void AtomicStore(T* p, V v, int = 0) { *p = T(v); }
template <class T, class V> static inline void AtomicAddx2(T* p, V v, int = 0) {
  const T* add = (const T*)&v;
  if constexpr (std::is_pointer_v<V>) add = (const T*)v;
  for (int i = 0; i < 2; i++) AtomicAdd(p + i, add[i]);
}
template <class T, class V> static inline void AtomicAddx4(T* p, V v, int = 0) {
  const T* add = (const T*)&v;
  if constexpr (std::is_pointer_v<V>) add = (const T*)v;
  for (int i = 0; i < 4; i++) AtomicAdd(p + i, add[i]);
}

namespace tl {
// Warps hand each other registers; fibers have all they want.
template <int n> static inline void warpgroup_reg_alloc() {}
template <int n> static inline void warpgroup_reg_dealloc() {}

// ---- packed pairs ----

template <class T> static inline T from_uint1(uint1 v) { return emu_bits<T>(v); }
template <class T> static inline uint1 to_uint1(T v) { return emu_bits<uint1>(v); }
static inline float fast_rcp(float x) { return 1.0f / x; }
template <class T> static inline T fast_max(T a, T b) { return emu_max(a, b); }
template <class T> static inline T fast_min(T a, T b) { return emu_min(a, b); }
template <int n, class T> static inline T pow_of_int(T x) {
  T r = x;
  for (int i = 1; i < n; i++) r = r * x;
  return r;
}
static inline float2 add2(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
static inline float2 sub2(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
static inline float2 mul2(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
static inline float2 fma2(float2 a, float2 b, float2 c) { return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)}; }
static inline float2 max2(float2 a, float2 b) { return {fmaxf(a.x, b.x), fmaxf(a.y, b.y)}; }
static inline float2 min2(float2 a, float2 b) { return {fminf(a.x, b.x), fminf(a.y, b.y)}; }
static inline float2 abs2(float2 a) { return {fabsf(a.x), fabsf(a.y)}; }
typedef __nv_bfloat162 bf2;
static inline bf2 add2(bf2 a, bf2 b) { return {a.x + b.x, a.y + b.y}; }
static inline bf2 sub2(bf2 a, bf2 b) { return {a.x - b.x, a.y - b.y}; }
static inline bf2 mul2(bf2 a, bf2 b) { return {a.x * b.x, a.y * b.y}; }
static inline bf2 fma2(bf2 a, bf2 b, bf2 c) {
  return {bfloat16_t(fmaf(a.x, b.x, c.x)), bfloat16_t(fmaf(a.y, b.y, c.y))};
}

// ---- reductions ----

struct SumOp {
  template <class T> T operator()(T a, T b) { return a + b; }
};
struct MaxOp {
  template <class T> T operator()(T a, T b) { return T(emu_max(a, b)); }
};
struct MinOp {
  template <class T> T operator()(T a, T b) { return T(emu_min(a, b)); }
};
struct BitOrOp {
  template <class T> T operator()(T a, T b) { return a | b; }
};
struct BitAndOp {
  template <class T> T operator()(T a, T b) { return a & b; }
};
static inline void __sync_thread_partial(int id, int threads, EMU_LINE) {
  emu::block_barrier(id, threads, "named barrier", line);
}
template <int id, int threads> static inline void __sync_thread_partial(EMU_LINE) {
  emu::block_barrier(id, threads, "named barrier", line);
}
static inline void __named_barrier_arrive(int id, int threads, EMU_LINE) {
  emu::block_barrier(id, threads, "named barrier", line, false);
}
struct SyncThreadsBarrier {
  template <int phase = 0> static void sync() { __syncthreads(); }
};
template <int threads> struct NamedBarrier {
  template <int phase = 1> static void sync() { emu::block_barrier(phase, threads, "AllReduce", phase); }
};
// The butterfly of TileLang's own template, in its order: distances of a warp and more go through shared memory.
template <class Reducer, int threads, int scale, int offset = 0, class Sync = SyncThreadsBarrier, int batch = 1,
          int stride = 0>
struct AllReduce {
  template <class T> static void run_batch(T* x, T* buffer = nullptr) {
    int me = (int)threadIdx.x - offset;
    for (int distance = threads / 2; distance >= scale; distance /= 2) {
      if (distance >= 32) {
        Sync::template sync<1>();
        for (int i = 0; i < batch; i++) buffer[me + i * stride] = x[i];
        Sync::template sync<2>();
      }
      for (int i = 0; i < batch; i++)
        x[i] = Reducer()(x[i], distance >= 32 ? buffer[(me ^ distance) + i * stride]
                                              : __shfl_xor_sync(~0u, x[i], distance));
    }
  }
  template <class T> static T run(T x, T* buffer = nullptr) {
    run_batch(&x, buffer);
    return x;
  }
};
template <class T, class Op> static inline T warp_reduce(T v, Op op) {
  for (int distance = 16; distance; distance /= 2) v = op(v, __shfl_xor_sync(~0u, v, distance));
  return v;
}
template <class T> static inline T warp_reduce_sum(T v) { return warp_reduce(v, SumOp()); }
template <class T> static inline T warp_reduce_max(T v) { return warp_reduce(v, MaxOp()); }
template <class T> static inline T warp_reduce_min(T v) { return warp_reduce(v, MinOp()); }
template <class T> static inline T shfl_sync(uint m, T v, int s, EMU_LINE) { return __shfl_sync(m, v, s, 32, line); }
template <class T> static inline T shfl_xor_sync(uint m, T v, int s, EMU_LINE) {
  return __shfl_xor_sync(m, v, s, 32, line);
}
template <class T> static inline T shfl_down_sync(uint m, T v, int s, EMU_LINE) {
  return __shfl_down_sync(m, v, s, 32, line);
}
template <class T> static inline T shfl_up_sync(uint m, T v, int s, EMU_LINE) {
  return __shfl_up_sync(m, v, s, 32, line);
}
static inline int get_lane_idx(int = 32) { return emu::self->lane(); }
static inline int get_warp_idx(int = 32) { return emu::self->linear / 32; }
static inline int get_warp_idx_sync(int = 32) { return emu::self->linear / 32; }
static inline int get_warp_group_idx(int = 32, int = 4) { return emu::self->linear / 128; }
// the elected lane is the first; extent 0 elects one thread of the block
template <int extent> static inline bool tl_shuffle_elect() {
  return emu::self->linear % (extent ? extent : 1024) == 0;
}

// ---- clusters ----

static inline void cluster_arrive() { emu::cluster_arrive(); }
static inline void cluster_arrive_relaxed() { emu::cluster_arrive(); }
static inline void cluster_wait(EMU_LINE) { emu::cluster_wait(line); }
static inline void cluster_sync(EMU_LINE) { emu::cluster_arrive(), emu::cluster_wait(line); }
static inline int block_rank_in_cluster() { return emu::self->block->rank; }
static inline dim3 cluster_shape() { return emu::launch->cluster; }

// ---- copies and the barriers that count them ----

static inline void fence_proxy_async() {}
static inline void fence_barrier_init() {}
template <class B>
static inline void tma_store_cluster(void* to, void* from, int rank, uint32_t bytes, B& barrier) {
  emu::bulk_copy(to, from, rank, bytes, &barrier);
}

static inline void cp_async_commit() { emu::self->loads.commit(); }
template <int pending> static inline void cp_async_wait() {
  if (!pending) cp_async_commit();  // cp.async.wait_all needs no commit
  emu::self->loads.wait(pending);
}
template <class B> static inline void mbarrier_cp_async_arrive_noinc(B& barrier) { emu::arrive_with_loads(&barrier); }
template <int bytes> static inline void cp_async_gs(const void* to, const void* from) {
  emu::async_copy(emu::self->loads, (void*)to, from, bytes);
}
template <int bytes> static inline void cp_async_gs_conditional(const void* to, const void* from, bool condition) {
  static const char zeros[16] = {};
  emu::async_copy(emu::self->loads, (void*)to, condition ? from : zeros, bytes);
}
#define EMU_ACCESS(bits, T)                                                                          \
  static inline T load_global_##bits(const void* p) { return *(const T*)p; }                         \
  static inline T load_shared_##bits(const void* p) { return *(const T*)p; }                         \
  static inline T load_global_##bits##_conditional(const void* p, bool c) { return c ? *(const T*)p : T{}; } \
  static inline void store_global_##bits(void* p, T v) { *(T*)p = v; }                               \
  static inline void store_shared_##bits(void* p, T v) { *(T*)p = v; }                               \
  static inline void store_global_##bits##_conditional(void* p, T v, bool c) { if (c) *(T*)p = v; }
EMU_ACCESS(32, uint)
EMU_ACCESS(64, uint2)
EMU_ACCESS(128, uint4)

// ---- tensor cores ----

// ldmatrix: 8x8 matrices of 16-bit elements. Lane 8i + r points at row r of matrix i; lane l receives the pair of
// elements (2(l % 4), +1) of row l / 4, or of column l / 4 when transposed. The last lane to come loads for all.
template <int matrices, bool transposed> static inline void emu_ldmatrix(const void* row, void* registers, int line) {
  if (emu::self->warp().alive != ~0u) emu::fail("ldmatrix needs all 32 lanes");
  const emu::Slot* slots = emu::exchange(~0u, &row, sizeof row, "ldmatrix", line, [](emu::Slot* slots) {
    const uint16_t* rows[32];
    for (int l = 0; l < 32; l++) memcpy(&rows[l], &slots[l], sizeof rows[l]);
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < matrices; i++)
        for (int half = 0; half < 2; half++) {
          int r = l / 4, c = 2 * (l % 4) + half;
          uint16_t element = transposed ? rows[8 * i + c][r] : rows[8 * i + r][c];
          memcpy(slots[l].bytes + 4 * i + 2 * half, &element, 2);
        }
  });
  memcpy(registers, &slots[emu::self->lane()], 4 * matrices);
}
#define EMU_LDMATRIX(n)                                                                                            \
  static inline void ptx_ldmatrix_x##n(const void* p, void* r, EMU_LINE) { emu_ldmatrix<n, false>(p, r, line); }   \
  static inline void ptx_ldmatrix_x##n##_trans(const void* p, void* r, EMU_LINE) { emu_ldmatrix<n, true>(p, r, line); }
EMU_LDMATRIX(1) EMU_LDMATRIX(2) EMU_LDMATRIX(4)

enum class DataType { kBFloat16, kFloat32, kTensorFloat32 };

// mma.sync m16n8k16 (bf16) and m16n8k8 (tf32), the same picture in 32-bit registers of p elements: with g = lane / 4
// and t = lane % 4, A's register 2j + i holds row g + 8i, elements p(t + 4j) on; B's register j holds column g, same
// elements; C holds rows g, g, g + 8, g + 8 and columns 2t, 2t + 1, 2t, 2t + 1.
template <DataType A, DataType B, DataType C, int M, int N, int K, bool transposed_a, bool transposed_b>
static inline void mma_sync(float* c, const unsigned* a, const unsigned* b, EMU_LINE) {
  constexpr bool bf16 = A == DataType::kBFloat16;
  static_assert(A == B && A != DataType::kFloat32 && C == DataType::kFloat32 && M == 16 && N == 8);
  static_assert(K == (bf16 ? 16 : 8) && !transposed_a && transposed_b);
  if (emu::self->warp().alive != ~0u) emu::fail("mma.sync needs all 32 lanes");
  constexpr int p = bf16 ? 2 : 1;
  uint32_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const emu::Slot* slots = emu::exchange(~0u, mine, sizeof mine, "mma.sync", line);
  // element e of register `index` of a lane; tf32 ignores the low 13 bits
  auto element = [&](int lane, int index, int e) {
    uint32_t word;
    memcpy(&word, slots[lane].bytes + 4 * index, 4);
    return (double)emu_bits<float>(bf16 ? (e ? word & 0xFFFF0000u : word << 16) : word & ~0x1FFFu);
  };
  int g = emu::self->lane() / 4, t = emu::self->lane() % 4;
  for (int i = 0; i < 4; i++) {
    double sum = c[i];
    for (int k = 0; k < K; k++) {
      int j = k / (4 * p), from = k / p % 4;
      sum += element(4 * g + from, 2 * j + i / 2, k % p) * element(4 * (2 * t + i % 2) + from, 4 + j, k % p);
    }
    float rounded = (float)sum;  // to nearest; the hardware truncates
    c[i] = fabs((double)rounded) > fabs(sum) ? nextafterf(rounded, 0.0f) : rounded;
  }
}
}  // namespace tl


struct alignas(8) Barrier {
  uint64_t place;
  size_t offset() const { return emu::shared_offset(this); }
  emu::MBarrier& here() const { return emu::mbarrier(*emu::self->block, offset()); }
  emu::MBarrier& at(int rank) const { return emu::mbarrier(emu::peer_block(rank), offset()); }
  void init(uint32_t arrivals) const { emu::mbarrier_init(offset(), arrivals); }
  void wait(uint32_t parity, EMU_LINE) const { emu::mbarrier_wait(here(), parity, line); }
  void arrive() const { emu::mbarrier_arrive(here(), 0); }
  void arrive(uint32_t rank, uint32_t predicate = 1) const {
    if (predicate) emu::mbarrier_arrive(at(rank), 0);
  }
  void expect_transaction(uint32_t bytes) const { here().bytes += bytes; }
  void arrive_and_expect_tx(uint32_t bytes) const { emu::mbarrier_arrive(here(), bytes); }
};

// ---- what the kernels add in CUDA ----

template <class B>
static inline void mhc_send(float a, float b, float c, float d, const void* to, B& barrier, int rank) {
  emu::async_store({a, b, c, d}, to, rank, &barrier);
}
static inline void mhc_prefetch(const void* from, int bytes) {
  if (bytes % 16 || (uintptr_t)from % 16) emu::fail("bulk prefetches ask for aligned units of 16 bytes");
  const volatile char* asked = (const volatile char*)from;
  (void)asked[0], (void)asked[bytes - 1];  // a guard page notices what no tensor has
}
