// What runs a kernel's threads and holds its memory, compiled once and linked to every kernel. See emulator.h.
#include <algorithm>
#include <string>
#include <sys/mman.h>
#include "fibers.h"

namespace emu {

// ---- memory ----

static unsigned char* map(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("no memory for %zu bytes of stacks and shared memory", bytes);
  return (unsigned char*)p;
}
static size_t shared_room() { return (launch->shared + kPage) / kPage * kPage; }  // at least a byte of red zone

size_t shared_offset(const void* p) {
  size_t offset = (const unsigned char*)p - self->block->shared;
  if (offset >= launch->shared) fail("a pointer that should point into shared memory does not");
  return offset;
}

Block& peer_block(int rank) {
  int size = launch->cluster.x * launch->cluster.y * launch->cluster.z;
  if (rank < 0 || rank >= size) fail("rank %d is outside the cluster of %d", rank, size);
  Block& peer = self->block->peers[rank];
  if (peer.started < peer.threads) fail("cluster peer %d has not started: a cluster_sync must come first", rank);
  if (!peer.alive) fail("cluster peer %d has exited: it must stay until a last cluster_sync", rank);
  return peer;
}

// Distributed shared memory: the same offset in the peer's shared memory.
void* peer_shared(const void* p, int rank) { return peer_block(rank).shared + shared_offset(p); }

void CopyGroups::commit() {
  committed.push_back(std::move(open));
  open.clear();
}
void CopyGroups::wait(size_t pending) {
  while (committed.size() > pending) {
    for (const Copy& c : committed.front()) memcpy(c.to, c.from, c.bytes);
    committed.erase(committed.begin());
  }
}
std::vector<Copy> CopyGroups::take() {
  commit();
  std::vector<Copy> all;
  for (const auto& group : committed) all.insert(all.end(), group.begin(), group.end());
  committed.clear();
  return all;
}

static bool lands_at_once() { return launch->seed < 2 ? launch->seed & 1 : dice() & 1; }

void async_copy(CopyGroups& groups, void* to, const void* from, size_t bytes) {
  if (lands_at_once())
    memcpy(to, from, bytes);
  else
    groups.open.push_back({to, from, bytes});
}

MBarrier& mbarrier(Block& block, size_t offset) {
  auto found = block.mbarriers.find(offset);
  if (found == block.mbarriers.end()) fail("an mbarrier is used before its init is known here");
  return found->second;
}

void mbarrier_init(size_t offset, int arrivals) { self->block->mbarriers[offset] = {arrivals, arrivals}; }

void mbarrier_arrive(MBarrier& b, long bytes) {
  if (!b.pending) fail("more arrivals than the %d of an mbarrier's phase", b.expected);
  b.bytes += bytes, b.pending--;
  b.settle();
}

void mbarrier_wait(MBarrier& b, unsigned parity, int line) {
  while ((b.generation & 1) == (parity & 1)) wait_for(b.generation, b.generation, "mbarrier", line);
}

// Copies that an mbarrier waits for: a bulk copy into a peer's shared memory, whose bytes it counts, or a thread's own
// loads, for which it counts an arrival. Those in flight land when nothing else can happen, or earlier by the dice; they
// read their sources only then.
struct Bulk {
  Block *source, *target;
  MBarrier* barrier;
  std::vector<Copy> copies;
  float value[4] = {};  // copied where a copy names no source
  bool arrives = false;
};
static std::vector<Bulk> in_flight;

static void land(const Bulk& b) {
  if (!b.target->alive) fail("a bulk copy lands in a cluster peer that has exited");
  if (!b.source->alive) fail("a block exited while its bulk copy was in flight");
  for (const Copy& c : b.copies) memcpy(c.to, c.from ? c.from : b.value, c.bytes);
  if (b.arrives) return mbarrier_arrive(*b.barrier, 0);
  for (const Copy& c : b.copies) b.barrier->bytes -= c.bytes;
  b.barrier->settle();
}

static void land_one(size_t i) {
  Bulk b = std::move(in_flight[i]);
  in_flight.erase(in_flight.begin() + i);
  land(b);
}

static void send_off(Bulk b) {
  if (b.copies.empty() || lands_at_once())
    land(b);
  else
    in_flight.push_back(std::move(b));
}

void bulk_copy(void* to, const void* from, int rank, size_t bytes, const void* barrier) {
  if (bytes % 16 || (uintptr_t)to % 16 || (uintptr_t)from % 16) fail("bulk copies move aligned units of 16 bytes");
  Block& peer = peer_block(rank);
  // a GPU's memory checker calls it an invalid write, although the copy does arrive
  if (&peer == self->block) fail("a bulk copy to shared memory must go to another block of the cluster");
  shared_offset((const char*)from + bytes - 1), shared_offset((char*)to + bytes - 1);
  MBarrier& there = mbarrier(peer, shared_offset(barrier));
  mbarrier_arrive(there, bytes);
  send_off({self->block, &peer, &there, {{peer_shared(to, rank), from, bytes}}});
}

// An asynchronous store of four floats into a peer's shared memory: as a bulk copy, out of registers, and its bytes have
// been or will be announced there.
void async_store(const float (&value)[4], const void* to, int rank, const void* barrier) {
  if ((uintptr_t)to % 16) fail("asynchronous stores of four floats are aligned to 16 bytes");
  Block& peer = peer_block(rank);
  if (&peer == self->block) fail("an asynchronous store must go to another block of the cluster");
  shared_offset((const char*)to + 15);
  Bulk b = {&peer, &peer, &mbarrier(peer, shared_offset(barrier)), {{peer_shared(to, rank), nullptr, sizeof value}}};
  memcpy(b.value, value, sizeof value);
  send_off(std::move(b));
}

// The thread arrives at the barrier when all its loads so far have landed.
void arrive_with_loads(const void* barrier) {
  Bulk b = {self->block, self->block, &mbarrier(*self->block, shared_offset(barrier)), self->loads.take()};
  b.arrives = true;
  send_off(std::move(b));
}

// ---- running ----

// What a launch lives in. Not local to `run`, which a failing launch leaves by a jump.
static std::vector<Block> blocks;
static std::vector<Thread> threads;
static std::vector<Cluster> clusters;
static unsigned char* arena;
static size_t arena_bytes;

static void release() {
  if (arena) munmap(arena, arena_bytes);
  arena = nullptr;
  blocks.clear(), threads.clear(), clusters.clear(), in_flight.clear();
}

// The first and the last thing that a fiber does.
static void thread_main() {
  self->started = true, self->block->started++;
  launch->kernel(launch->args);
  // legal, but no kernel here means it
  if (self->in_cluster_barrier) fail("exits between a cluster_arrive and its cluster_wait");
  self->done = true;
  if (memcmp(self->stack, &kCanary, 8)) fail("the stack of %zu bytes overflowed", kStackBytes);
  Block& b = *self->block;
  Warp& warp = self->warp();
  warp.alive &= ~(1u << self->lane());
  for (auto& [mask, m] : warp.meetings)
    if (m.arrived && m.arrived == (mask & warp.alive)) m.open();
  Cluster& c = *b.cluster;
  b.alive--, c.alive--;
  if (c.barrier.arrived && c.barrier.arrived == c.alive) c.barrier.open();
  to_scheduler();
}

// Threads that run until all of them wait; most units wait for one gate at most passes, which one look then tells.
struct Unit {
  std::vector<Thread*> threads;
  const unsigned* gate = nullptr;  // of all of them, or null
  unsigned seen = 0;
  bool waits() const { return gate && *gate == seen; }
  void note_gate() {
    gate = threads.empty() ? nullptr : threads[0]->gate;
    seen = gate ? threads[0]->seen : 0;
    for (const Thread* t : threads)
      if (t->gate != gate || t->seen != seen) gate = nullptr;
  }
};

static void report_deadlock(const std::vector<Unit>& units, size_t all) {
  std::map<std::string, int> places;
  size_t waiting = 0;
  for (auto& unit : units)
    for (Thread* t : unit.threads) places[std::string(t->waits_at) + " (line " + std::to_string(t->line) + ")"]++, waiting++;
  std::string text;
  for (auto& [place, n] : places) text += ", " + std::to_string(n) + " wait at " + place;
  self = nullptr;
  dim3 index;
  for (auto& unit : units)
    if (!unit.threads.empty()) index = unit.threads[0]->block->index;
  fail("deadlock in block (%u,%u,%u): of %zu threads %zu exited%s", index.x, index.y, index.z, all, all - waiting,
       text.c_str());
}

// A unit runs until all of it waits for something outside. Units are warps, so that one warp runs as far ahead of the
// others as the barriers let it; under even random seeds all threads are one unit and advance together, shuffled.
static void run_threads() {
  uint32_t seed = launch->seed;
  bool by_warp = seed < 2 || seed & 1;
  std::vector<Unit> units;
  for (Thread& t : threads) {
    if (units.empty() || (by_warp && t.lane() == 0)) units.emplace_back();
    units.back().threads.push_back(&t);
  }
  if (seed == 1) {
    std::reverse(units.begin(), units.end());
    for (Unit& unit : units) std::reverse(unit.threads.begin(), unit.threads.end());
  }
  for (; !units.empty(); passes++) {
    if (seed > 1) std::shuffle(units.begin(), units.end(), dice);
    bool progress = false;
    for (Unit& unit : units) {
      auto& mine = unit.threads;
      bool ran = false;
      for (bool again = true; again; ran |= again) {
        again = false;
        if (seed > 1) std::shuffle(mine.begin(), mine.end(), dice);
        if (!ran && unit.waits()) break;
        for (Thread* t : mine) {
          if (t->done || (t->gate && *t->gate == t->seen)) continue;
          t->gate = nullptr, again = true, self = t;
          to_thread(t);
        }
      }
      if (!ran) continue;
      progress = true;
      mine.erase(std::remove_if(mine.begin(), mine.end(), [](Thread* t) { return t->done; }), mine.end());
      unit.note_gate();
    }
    if (!in_flight.empty() && (!progress || (seed > 1 && dice() % 4 == 0)))
      land_one(seed > 1 ? dice() % in_flight.size() : 0);
    else if (!progress)
      report_deadlock(units, threads.size());
    units.erase(std::remove_if(units.begin(), units.end(), [](const Unit& u) { return u.threads.empty(); }), units.end());
  }
}

// Gives the blocks in memory the places of the clusters of these numbers, and each fresh shared memory and threads.
static void place(const long* numbers) {
  dim3 g = launch->grid, b = launch->block, c = launch->cluster;
  int per_cluster = c.x * c.y * c.z, per_block = b.x * b.y * b.z;
  for (size_t i = 0; i < blocks.size(); i++) {
    Block& block = blocks[i];
    unsigned char* shared = block.shared;
    block = Block();
    block.shared = shared, block.cluster = &clusters[i / per_cluster];
    block.rank = i % per_cluster, block.peers = &block - block.rank;
    if (!block.rank) *block.cluster = {Barrier(), per_cluster * per_block};
    long n = numbers[i / per_cluster];
    unsigned cx = g.x / c.x, cy = g.y / c.y, r = block.rank;
    block.index = {unsigned(n % cx) * c.x + r % c.x, unsigned(n / cx % cy) * c.y + r / c.x % c.y,
                   unsigned(n / cx / cy) * c.z + r / c.x / c.y};
    block.threads = block.alive = per_block;
    block.warps.resize((per_block + 31) / 32);
    memset(shared, kPoison, shared_room());
    for (int t = 0; t < per_block; t++) {
      Thread& thread = threads[i * per_block + t];
      Thread fresh;
      fresh.stack = thread.stack, fresh.context = thread.context, fresh.block = &block, fresh.linear = t;
      fresh.index = {t % b.x, t / b.x % b.y, t / b.x / b.y};
      thread = fresh;
      memcpy(thread.stack, &kCanary, 8);
      prepare(thread, thread_main);
      block.warps[t / 32].alive |= 1u << t % 32;
    }
  }
}

static void check_red_zones() {
  for (const Block& b : blocks)
    for (size_t i = launch->shared; i < shared_room(); i++)
      if (b.shared[i] != kPoison)
        fail("block (%u,%u,%u) wrote byte %zu of its %zu bytes of shared memory", b.index.x, b.index.y, b.index.z, i,
             (size_t)launch->shared);
}

static void run() {
  dim3 g = launch->grid, b = launch->block, c = launch->cluster;
  long per_cluster = (long)c.x * c.y * c.z, per_block = (long)b.x * b.y * b.z;
  if (g.x % c.x || g.y % c.y || g.z % c.z) fail("the grid is not a multiple of the cluster");
  if (per_block > 1024 || per_cluster > 16) fail("%ld threads a block, %ld blocks a cluster", per_block, per_cluster);
  if (launch->dynamic_shared > kMaxShared) fail("%zu bytes of shared memory", (size_t)launch->dynamic_shared);
  std::vector<long> order((long)g.x * g.y * g.z / per_cluster);
  for (size_t i = 0; i < order.size(); i++) order[i] = i;
  dice.seed(launch->seed);
  if (launch->seed == 1) std::reverse(order.begin(), order.end());
  if (launch->seed > 1) std::shuffle(order.begin(), order.end(), dice);

  size_t at_once = launch->concurrent ? order.size() : 1;
  blocks.resize(at_once * per_cluster);
  threads.resize(blocks.size() * per_block);
  clusters.resize(at_once);
  size_t room = shared_room() + kPage;
  arena_bytes = kPage + room * blocks.size() + kStackBytes * threads.size();
  arena = map(arena_bytes);
  mprotect(arena, kPage, PROT_NONE);
  for (size_t i = 0; i < blocks.size(); i++) {
    blocks[i].shared = arena + kPage + i * room;
    mprotect(blocks[i].shared + shared_room(), kPage, PROT_NONE);
  }
  for (size_t i = 0; i < threads.size(); i++)
    threads[i].stack = arena + kPage + room * blocks.size() + i * kStackBytes;

  grid_threads = threads.size(), grid_barrier = Barrier(), spins = 0;
  for (size_t i = 0; i < order.size(); i += at_once) {
    place(&order[i]);
    run_threads();
    self = nullptr;
    if (!in_flight.empty()) fail("a block exited while its bulk copy was in flight");
    check_red_zones();
  }
}

// Returns 0, or 1 with a message and, after an access outside all memory, its address.
static int guarded_run(const Launch* what, char* message_out, uint64_t* fault_out) {
  static char signal_stack[64 << 10];
  launch = what, message = message_out, fault_address = fault_out, self = nullptr;
  stack_t stack = {}, old_stack;
  stack.ss_sp = signal_stack, stack.ss_size = sizeof signal_stack;
  sigaltstack(&stack, &old_stack);
  struct sigaction action = {}, old[3];
  action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int signals[3] = {SIGSEGV, SIGBUS, SIGFPE};
  for (int i = 0; i < 3; i++) sigaction(signals[i], &action, &old[i]);
  volatile int failed = 1;
  if (!sigsetjmp(give_up, 1)) run(), failed = 0;
  release();
  for (int i = 0; i < 3; i++) sigaction(signals[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  return failed;
}

}  // namespace emu

EMU_EXPORT int emu_run(const emu::Launch* launch, char* message, uint64_t* fault) {
  return emu::guarded_run(launch, message, fault);
}
