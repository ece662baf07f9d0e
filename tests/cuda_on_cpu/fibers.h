// Threads as fibers, the barriers and warp collectives they meet at, and how a launch is given up. See emulator.h.
#pragma once
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace emu {

constexpr size_t kPage = 4096, kStackBytes = 128 << 10, kMaxShared = 232448;
constexpr int kPoison = 0xFF;  // NaN as bf16 and fp32, -1 as an integer
constexpr uint64_t kCanary = 0x5AFE5AFE5AFE5AFE;
constexpr long kSpinLimit = 1 << 22;

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
  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }
  void wait(size_t pending) {
    while (committed.size() > pending) {
      for (const Copy& c : committed.front()) memcpy(c.to, c.from, c.bytes);
      committed.erase(committed.begin());
    }
  }
  std::vector<Copy> take() {
    commit();
    std::vector<Copy> all;
    for (const auto& group : committed) all.insert(all.end(), group.begin(), group.end());
    committed.clear();
    return all;
  }
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

static const Launch* launch;
static Thread* self;
static Barrier grid_barrier;
static long grid_threads, spins;
static unsigned passes;  // rounds of the scheduler
static std::mt19937 dice;
static void* scheduler_stack;
static ucontext_t scheduler_context;
static sigjmp_buf give_up;
static char* message;
static uint64_t* fault_address;
constexpr size_t kMessageBytes = 1024;

// Ends the launch with a message; the fibers are simply abandoned.
[[noreturn]] static void fail(const char* format, ...) {
  va_list list;
  va_start(list, format);
  int n = vsnprintf(message, kMessageBytes, format, list);
  va_end(list);
  if (self && n < (int)kMessageBytes)
    snprintf(message + n, kMessageBytes - n, " [thread (%u,%u,%u) of block (%u,%u,%u)]", self->index.x, self->index.y,
             self->index.z, self->block->index.x, self->block->index.y, self->block->index.z);
  siglongjmp(give_up, 1);
}

static void on_signal(int number, siginfo_t* info, void*) {
  *fault_address = (uint64_t)info->si_addr;
  fail(number == SIGFPE ? "division by zero" : "access to address %p, outside all memory", info->si_addr);
}

// ---- switching fibers ----

// swapcontext would make a system call at every switch; six registers and a stack pointer are all that is needed.
#if defined(__x86_64__) && !defined(EMU_PORTABLE_SWITCH)
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
static void to_thread(Thread* t) { emu_switch(&scheduler_stack, t->stack_pointer); }
static void to_scheduler() { emu_switch(&self->stack_pointer, scheduler_stack); }
static void prepare(Thread& t, void (*entry)()) {
  void** top = (void**)(t.stack + kStackBytes - 64);  // 16-byte aligned before the return address is popped
  *--top = nullptr;
  *--top = (void*)entry;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  t.stack_pointer = top;
}
#else
static void to_thread(Thread* t) { swapcontext(&scheduler_context, t->context); }
static void to_scheduler() { swapcontext(self->context, &scheduler_context); }
static void prepare(Thread& t, void (*entry)()) {
  if (!t.context) t.context = new ucontext_t;
  getcontext(t.context);
  t.context->uc_stack.ss_sp = t.stack, t.context->uc_stack.ss_size = kStackBytes;
  makecontext(t.context, entry, 0);
}
#endif

// ---- waiting ----

static void wait_for(const unsigned& generation, unsigned seen, const char* what, int line) {
  self->gate = &generation, self->seen = seen, self->waits_at = what, self->line = line;
  to_scheduler();
}

// A polling loop gives way to the others at every look.
static void give_way() {
  if (++spins > kSpinLimit)
    fail("polls a flag that nobody sets; a kernel that waits for other blocks must run with concurrent=True");
  wait_for(passes, passes, "an atomic", 0);
}

static void arrive_and_wait(Barrier& b, int expected, const char* what, int line, bool wait = true) {
  unsigned seen = b.generation;
  if (++b.arrived == expected)
    b.open();
  else if (wait)
    wait_for(b.generation, seen, what, line);
}

static void block_barrier(int id, int threads, const char* what, int line, bool wait = true) {
  if (id < 0 || id > 15) fail("barrier %d does not exist, there are 16", id);
  Barrier& b = self->block->barriers[id];
  // named barriers may pair different places, __syncthreads may not
  if (id == 0 && b.arrived && b.line != line)
    fail("divergent barrier: line %d meets line %d of the same block at %s", line, b.line, what);
  b.line = line;
  arrive_and_wait(b, threads, what, line, wait);
}

// barrier.cluster counts the threads that have not exited, hence the look at every exit.
static void cluster_arrive() {
  Cluster& c = *self->block->cluster;
  if (self->in_cluster_barrier) fail("cluster_arrive twice without a cluster_wait");
  self->in_cluster_barrier = true, self->cluster_phase = c.barrier.generation;
  if (++c.barrier.arrived == c.alive) c.barrier.open();
}
static void cluster_wait(int line) {
  Barrier& b = self->block->cluster->barrier;
  if (!self->in_cluster_barrier) fail("cluster_wait without a cluster_arrive");
  self->in_cluster_barrier = false;
  if (b.generation == self->cluster_phase) wait_for(b.generation, self->cluster_phase, "cluster_wait", line);
}

// The lanes of `mask` lay `bytes` each on the table; the last to come may work on the table (`last`), then all read it.
template <class Last>
static const Slot* exchange(uint32_t mask, const void* value, size_t bytes, const char* what, int line, Last last) {
  static_assert(sizeof(Slot) == 32);
  Warp& warp = self->warp();
  uint32_t bit = 1u << self->lane();
  if (!(mask & bit)) fail("%s with mask 0x%08x leaves out its own lane %d", what, mask, self->lane());
  Meeting& m = warp.meetings[mask];
  unsigned seen = m.generation;
  Slot* slots = m.slots[seen & 1];
  if (!m.arrived) memset(slots, kPoison, sizeof m.slots[0]);
  memcpy(&slots[self->lane()], value, bytes);
  m.arrived |= bit;
  if (m.arrived == (mask & warp.alive)) {
    last(slots);
    m.open();
  } else {
    wait_for(m.generation, seen, what, line);
  }
  return slots;
}

}  // namespace emu
