// A GPU in one thread of the CPU: runs the CUDA source that TileLang generates, block after block.
//
// Every CUDA thread is a fiber with its own stack. A fiber runs until it meets a barrier or a warp collective, then the
// next one runs. The order is the seed's: 0 forward, 1 backward, others random, anew at every pass. What barriers leave
// unordered therefore really happens in different orders, and a missing barrier shows.
//
// Caught: shared memory read before it is written (it holds NaN), tensors and shared memory left by an index (guard
// pages and red zones), barriers that not every thread reaches, an asynchronous copy that is not waited for (under seed
// 0 it lands as late as it may, under 1 at once, else by the dice), cluster peers that have not started or have left.
//
// Not modelled, so a passing kernel may still be wrong in these respects:
//   - memory order: all memory is sequentially consistent, a missing fence (of any proxy) or release goes unseen;
//   - divergence: lanes of a warp run one after the other between collectives, without reconvergence;
//   - rounding of approximate intrinsics (rsqrtf, __expf, ...): correctly rounded here; contraction to FMA is the host
//     compiler's choice; tensor cores sum a 16-deep product exactly and truncate once;
//   - blocks run one cluster at a time unless the launch is cooperative or `concurrent` is asked for;
//   - TMA with tensor maps and wgmma do not exist: the runner lowers with them turned off, so it is that
//     variant that runs; bulk copies without a tensor map do exist, to the blocks of a cluster and to global memory;
//   - time, bank conflicts, occupancy, registers, fp16 and fp8.
//
// Kernels see this header, through `cuda_names.h` and `tilelang_names.h`; `emulator.cpp` and `fibers.h` are the rest,
// compiled once and linked to every kernel.
#pragma once
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>
#include <ucontext.h>

// all else is hidden: every kernel's library has an emulator of its own
#define EMU_EXPORT extern "C" __attribute__((visibility("default")))

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace emu {

// ---- what a launch is, and how it ends ----

struct Launch {
  dim3 grid, block, cluster;
  uint64_t dynamic_shared, shared;  // bytes; `shared` also counts the static arrays placed behind the dynamic ones
  uint32_t seed, concurrent;
  void (*kernel)(void**);
  void** args;
};

// A barrier opens when enough threads have arrived; its generation then moves on, which frees whoever waits for that.
struct Barrier {
  int arrived = 0, line = 0;
  unsigned generation = 0;
  void open() { arrived = 0, generation++; }
};

// The lanes of one mask exchange 32 bytes each. Two sets of slots: a fast lane may already fill the next round's while
// slow ones still read this round's.
struct alignas(16) Slot {
  unsigned char bytes[32];
};
struct Meeting {
  uint32_t arrived = 0;
  unsigned generation = 0;
  Slot slots[2][32];
  void open() { arrived = 0, generation++; }
};
struct Warp {
  uint32_t alive = 0;
  std::map<uint32_t, Meeting> meetings;  // by mask
};

// An mbarrier opens when all arrivals of its phase and all bytes announced for it are in.
struct MBarrier {
  int expected = 0, pending = 0;
  long bytes = 0;
  unsigned generation = 0;
  void settle() {
    if (!pending && !bytes) pending = expected, generation++;
  }
};

struct Cluster {
  Barrier barrier;
  int alive = 0;
};

struct Block {
  dim3 index;
  int rank = 0, threads = 0;  // rank in the cluster
  int started = 0, alive = 0;
  unsigned char* shared = nullptr;
  Block* peers = nullptr;  // rank 0 of the cluster
  Cluster* cluster = nullptr;
  Barrier barriers[16];  // 0 is __syncthreads
  int votes[2] = {0, 0};
  std::map<size_t, MBarrier> mbarriers;  // by offset in shared memory
  std::vector<Warp> warps;
};

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

// A thread's asynchronous copies in flight: the group it is adding to and those it has committed, oldest first.
struct CopyGroups {
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> committed;
  void commit();
  void wait(size_t pending);
  std::vector<Copy> take();
};

struct Thread {
  void* stack_pointer = nullptr;
  ucontext_t* context = nullptr;
  unsigned char* stack = nullptr;
  Block* block = nullptr;
  dim3 index;
  int linear = 0, line = 0;
  const char* waits_at = nullptr;
  const unsigned* gate = nullptr;  // the generation it waits for to move on from `seen`
  unsigned seen = 0, cluster_phase = 0;
  bool in_cluster_barrier = false, started = false, done = false;
  CopyGroups loads;  // cp.async
  Warp& warp() const { return block->warps[linear / 32]; }
  int lane() const { return linear % 32; }
};

extern const Launch* launch;
extern Thread* self;
extern Barrier grid_barrier;
extern long grid_threads;

[[noreturn]] void fail(const char* format, ...);

// ---- barriers and warps: fibers.h ----

void give_way();
void arrive_and_wait(Barrier& b, int expected, const char* what, int line, bool wait = true);
void block_barrier(int id, int threads, const char* what, int line, bool wait = true);
void cluster_arrive();
void cluster_wait(int line);
const Slot* exchange(uint32_t mask, const void* value, size_t bytes, const char* what, int line,
                     void (*last)(Slot*) = [](Slot*) {});

// ---- memory: emulator.cpp ----

size_t shared_offset(const void* p);
Block& peer_block(int rank);
void* peer_shared(const void* p, int rank);
MBarrier& mbarrier(Block& block, size_t offset);
void mbarrier_init(size_t offset, int arrivals);
void mbarrier_arrive(MBarrier& b, long bytes);
void mbarrier_wait(MBarrier& b, unsigned parity, int line);
void async_copy(CopyGroups& groups, void* to, const void* from, size_t bytes);
void bulk_copy(void* to, const void* from, int rank, size_t bytes, const void* barrier);
void async_store(const float (&value)[4], const void* to, int rank, const void* barrier);
void arrive_with_loads(const void* barrier);

}  // namespace emu
