// CUDA's types and intrinsics, as far as TileLang's generated code uses them, spelled in terms of emulator.h.
#pragma once
#include <cmath>
#include <limits>
#include <type_traits>
#include "emulator.h"

#define __global__
#define __device__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define TL_DEVICE static inline
#define threadIdx (emu::self->index)
#define blockIdx (emu::self->block->index)
#define blockDim (emu::launch->block)
#define gridDim (emu::launch->grid)
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

// ---- vector types ----

#define EMU_VECTORS(T, name, align2, align4)                                                        \
  struct name##1 { T x; };                                                                          \
  struct alignas(align2) name##2 { T x, y; };                                                       \
  struct name##3 { T x, y, z; };                                                                    \
  struct alignas(align4) name##4 { T x, y, z, w; };                                                 \
  static inline name##1 make_##name##1(T x) { return {x}; }                                         \
  static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                 \
  static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                         \
  static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTORS(float, float, 8, 16)
EMU_VECTORS(double, double, 16, 16)
EMU_VECTORS(int, int, 8, 16)
EMU_VECTORS(uint, uint, 8, 16)
EMU_VECTORS(short, short, 4, 8)
EMU_VECTORS(ushort, ushort, 4, 8)
EMU_VECTORS(signed char, char, 2, 4)
EMU_VECTORS(uchar, uchar, 2, 4)
EMU_VECTORS(long long, longlong, 16, 16)
EMU_VECTORS(unsigned long long, ulonglong, 16, 16)

// bf16 is the upper half of fp32, rounded to nearest even.
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  template <class A> explicit bfloat16_t(A a) {
    float f = (float)a;
    uint32_t u;
    memcpy(&u, &f, 4);
    bits = f != f ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
  }
  operator float() const {
    uint32_t u = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
  bfloat16_t to_nv_bfloat16() const { return *this; }
  bfloat16_t& operator+=(bfloat16_t b) { return *this = bfloat16_t((float)*this + (float)b); }
};
#define EMU_BF16_OPERATOR(op) \
  static inline bfloat16_t operator op(bfloat16_t a, bfloat16_t b) { return bfloat16_t((float)a op(float) b); }
EMU_BF16_OPERATOR(+) EMU_BF16_OPERATOR(-) EMU_BF16_OPERATOR(*) EMU_BF16_OPERATOR(/)
static inline bfloat16_t operator-(bfloat16_t a) { return bfloat16_t(-(float)a); }
static inline bfloat16_t __ushort_as_bfloat16(ushort u) {
  bfloat16_t a;
  a.bits = u;
  return a;
}
static inline ushort __bfloat16_as_ushort(bfloat16_t a) { return a.bits; }
template <> struct std::numeric_limits<bfloat16_t> {
  static bfloat16_t infinity() { return __ushort_as_bfloat16(0x7F80); }
  static bfloat16_t quiet_NaN() { return __ushort_as_bfloat16(0x7FFF); }
  static bfloat16_t max() { return __ushort_as_bfloat16(0x7F7F); }
  static bfloat16_t lowest() { return __ushort_as_bfloat16(0xFF7F); }
};
typedef bfloat16_t __nv_bfloat16, nv_bfloat16;
struct alignas(4) __nv_bfloat162 {
  bfloat16_t x, y;
};
typedef __nv_bfloat162 nv_bfloat162;
static inline float __bfloat162float(bfloat16_t a) { return a; }
static inline bfloat16_t __float2bfloat16(float a) { return bfloat16_t(a); }
static inline bfloat16_t __float2bfloat16_rn(float a) { return bfloat16_t(a); }
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {bfloat16_t(a), bfloat16_t(b)}; }
static inline bfloat16_t __habs(bfloat16_t a) { return bfloat16_t(fabsf(a)); }
static inline bfloat16_t __hmax(bfloat16_t a, bfloat16_t b) { return bfloat16_t(fmaxf(a, b)); }
static inline bfloat16_t __hmin(bfloat16_t a, bfloat16_t b) { return bfloat16_t(fminf(a, b)); }
static inline uint __pack_nv_bfloat162(bfloat16_t a, bfloat16_t b) { return (uint)b.bits << 16 | a.bits; }

// ---- arithmetic ----

template <class To, class From> static inline To emu_bits(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To r;
  memcpy(&r, &v, sizeof r);
  return r;
}
// __fmul_rn and __fadd_rn are never contracted to an FMA: the empty asm hides where the value came from.
static inline float emu_rounded(float x) {
#ifdef __SSE__
  asm("" : "+x"(x));
#else
  asm("" : "+w"(x));
#endif
  return x;
}
static inline float __fmul_rn(float a, float b) { return emu_rounded(a * b); }
static inline float __fadd_rn(float a, float b) { return emu_rounded(emu_rounded(a) + emu_rounded(b)); }
static inline float __fsub_rn(float a, float b) { return emu_rounded(emu_rounded(a) - emu_rounded(b)); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float rsqrtf(float x) { return (float)(1.0 / sqrt((double)x)); }
static inline float __frsqrt_rn(float x) { return rsqrtf(x); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
#define __expf expf  // glibc has a hidden function of this name
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __powf powf
static inline uint __float_as_uint(float x) { return emu_bits<uint>(x); }
static inline int __float_as_int(float x) { return emu_bits<int>(x); }
static inline float __uint_as_float(uint x) { return emu_bits<float>(x); }
static inline float __int_as_float(int x) { return emu_bits<float>(x); }
static inline int __popc(uint x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
// unlike std::max, CUDA's drops a NaN and mixes types
template <class A, class B> static inline std::common_type_t<A, B> emu_max(A a, B b) {
  if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>) return std::fmax(a, b);
  else return a > b ? a : b;
}
template <class A, class B> static inline std::common_type_t<A, B> emu_min(A a, B b) {
  if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>) return std::fmin(a, b);
  else return a < b ? a : b;
}
#define max emu_max
#define min emu_min
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline void __stcs(T* p, T v) { *p = v; }
template <class T> static inline void __stcg(T* p, T v) { *p = v; }

// ---- barriers and warps ----

#define EMU_LINE int line = __builtin_LINE()
static inline void __syncthreads(EMU_LINE) { emu::block_barrier(0, emu::self->block->threads, "__syncthreads", line); }
static inline int __syncthreads_count(int predicate, EMU_LINE) {
  emu::Block& b = *emu::self->block;
  int& votes = b.votes[b.barriers[0].generation & 1];
  if (!b.barriers[0].arrived) votes = 0;
  votes += predicate != 0;
  __syncthreads(line);
  return votes;
}
static inline int __syncthreads_or(int predicate, EMU_LINE) { return __syncthreads_count(predicate, line) > 0; }
static inline int __syncthreads_and(int predicate, EMU_LINE) { return __syncthreads_count(!predicate, line) == 0; }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void __nanosleep(unsigned) { emu::give_way(); }
static inline void cudaGridDependencySynchronize() {}
static inline void cudaTriggerProgrammaticLaunchCompletion() {}
[[noreturn]] static inline void __trap() { emu::fail("__trap"); }

static inline void __syncwarp(uint mask = ~0u, EMU_LINE) {
  emu::exchange(mask, &mask, 4, "__syncwarp", line);
}
// A lane that the mask leaves out, or that has exited, hands over poison.
template <class T> static inline T emu_shuffle(uint mask, T v, int source, const char* what, int line) {
  static_assert(sizeof(T) <= sizeof(emu::Slot));
  const emu::Slot* slots = emu::exchange(mask, &v, sizeof v, what, line);
  T r;
  memcpy(&r, &slots[source & 31], sizeof r);
  return r;
}
// Shuffles stay inside segments of `width` lanes; a source outside the segment gives the lane's own value.
template <class T> static inline T __shfl_sync(uint mask, T v, int source, int width = 32, EMU_LINE) {
  int lane = emu::self->lane();
  return emu_shuffle(mask, v, (lane & -width) | (source & (width - 1)), "__shfl_sync", line);
}
template <class T> static inline T __shfl_xor_sync(uint mask, T v, int bits, int width = 32, EMU_LINE) {
  int lane = emu::self->lane(), source = lane ^ bits;
  return emu_shuffle(mask, v, source < (lane & -width) + width ? source : lane, "__shfl_xor_sync", line);
}
template <class T> static inline T __shfl_down_sync(uint mask, T v, int delta, int width = 32, EMU_LINE) {
  int lane = emu::self->lane(), source = lane + delta;
  return emu_shuffle(mask, v, source < (lane & -width) + width ? source : lane, "__shfl_down_sync", line);
}
template <class T> static inline T __shfl_up_sync(uint mask, T v, int delta, int width = 32, EMU_LINE) {
  int lane = emu::self->lane(), source = lane - delta;
  return emu_shuffle(mask, v, source >= (lane & -width) ? source : lane, "__shfl_up_sync", line);
}
static inline uint __ballot_sync(uint mask, int predicate, EMU_LINE) {
  uint vote = predicate != 0, ballot = 0;
  const emu::Slot* slots = emu::exchange(mask, &vote, 4, "__ballot_sync", line);
  for (int lane = 0; lane < 32; lane++) {
    memcpy(&vote, &slots[lane], 4);
    if (vote == 1) ballot |= 1u << lane;  // poison is not 1
  }
  return ballot;
}
static inline int __any_sync(uint mask, int p, EMU_LINE) { return __ballot_sync(mask, p, line) != 0; }
static inline int __all_sync(uint mask, int p, EMU_LINE) { return __ballot_sync(mask, !p, line) == 0; }

namespace cooperative_groups {
struct grid_group {
  void sync(EMU_LINE) { emu::arrive_and_wait(emu::grid_barrier, emu::grid_threads, "grid.sync", line); }
};
static inline grid_group this_grid() {
  if (!emu::launch->concurrent) emu::fail("grid sync in a launch that is not cooperative");
  return {};
}
struct cluster_group {
  template <class T> T* map_shared_rank(T* p, int rank) { return (T*)emu::peer_shared(p, rank); }
  void sync(EMU_LINE) { emu::cluster_arrive(), emu::cluster_wait(line); }
  int block_rank() { return emu::self->block->rank; }
};
static inline cluster_group this_cluster() { return {}; }
}  // namespace cooperative_groups
