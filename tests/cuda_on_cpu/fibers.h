// Threads as fibers, the barriers and warp collectives they meet at, and how a launch is given up. See emulator.h.
#pragma once
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <random>
#include "emulator.h"

namespace emu {

constexpr size_t kPage = 4096, kStackBytes = 128 << 10, kMaxShared = 232448;
constexpr int kPoison = 0xFF;  // NaN as bf16 and fp32, -1 as an integer
constexpr uint64_t kCanary = 0x5AFE5AFE5AFE5AFE;
constexpr long kSpinLimit = 1 << 22;

const Launch* launch;
Thread* self;
Barrier grid_barrier;
long grid_threads;
static long spins;
static unsigned passes;  // rounds of the scheduler
static std::mt19937 dice;
static void* scheduler_stack;
static ucontext_t scheduler_context;
static sigjmp_buf give_up;
static char* message;
static uint64_t* fault_address;
constexpr size_t kMessageBytes = 1024;

// Ends the launch with a message; the fibers are simply abandoned.
[[noreturn]] void fail(const char* format, ...) {
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
void give_way() {
  if (++spins > kSpinLimit)
    fail("polls a flag that nobody sets; a kernel that waits for other blocks must run with concurrent=True");
  wait_for(passes, passes, "an atomic", 0);
}

void arrive_and_wait(Barrier& b, int expected, const char* what, int line, bool wait) {
  unsigned seen = b.generation;
  if (++b.arrived == expected)
    b.open();
  else if (wait)
    wait_for(b.generation, seen, what, line);
}

void block_barrier(int id, int threads, const char* what, int line, bool wait) {
  if (id < 0 || id > 15) fail("barrier %d does not exist, there are 16", id);
  Barrier& b = self->block->barriers[id];
  // named barriers may pair different places, __syncthreads may not
  if (id == 0 && b.arrived && b.line != line)
    fail("divergent barrier: line %d meets line %d of the same block at %s", line, b.line, what);
  b.line = line;
  arrive_and_wait(b, threads, what, line, wait);
}

// barrier.cluster counts the threads that have not exited, hence the look at every exit.
void cluster_arrive() {
  Cluster& c = *self->block->cluster;
  if (self->in_cluster_barrier) fail("cluster_arrive twice without a cluster_wait");
  self->in_cluster_barrier = true, self->cluster_phase = c.barrier.generation;
  if (++c.barrier.arrived == c.alive) c.barrier.open();
}
void cluster_wait(int line) {
  Barrier& b = self->block->cluster->barrier;
  if (!self->in_cluster_barrier) fail("cluster_wait without a cluster_arrive");
  self->in_cluster_barrier = false;
  if (b.generation == self->cluster_phase) wait_for(b.generation, self->cluster_phase, "cluster_wait", line);
}

// The lanes of `mask` lay `bytes` each on the table; the last to come may work on the table (`last`), then all read it.
const Slot* exchange(uint32_t mask, const void* value, size_t bytes, const char* what, int line, void (*last)(Slot*)) {
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
