"""Stores into the shared memory of other blocks of a cluster, from registers.

No fence, no buffer to send from, no engine to wait for: the target's barrier counts the bytes, and a block that has
waited for all that is sent to it need not wait for its peers before it ends.
"""

import tilelang.language as T

# TileLang has no names for these instructions. `mhc_send` stores four floats in the shared memory of block `rank`, at
# the same place as here, and counts their bytes there at a barrier. `mhc_prefetch` has L2 fetch what it lacks: not a
# read, so it can come before a kernel has waited for the one ahead, whose stores go through L2.
PRELUDE = """
#if defined(__CUDACC__) && !defined(MHC_SEND)  // once, where several kernels share a source
#define MHC_SEND
template <class Barrier>
__forceinline__ __device__ void mhc_send(
    float a, float b, float c, float d, const void* to, Barrier& barrier, int rank) {
  asm volatile(
      "{\\n"
      ".reg .b32 to, barrier;\\n"
      "mapa.shared::cluster.u32 to, %4, %6;\\n"
      "mapa.shared::cluster.u32 barrier, %5, %6;\\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {%0, %1, %2, %3}, [barrier];\\n"
      "}\\n" ::"r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"(__float_as_uint(c)), "r"(__float_as_uint(d)),
      "r"((unsigned)__cvta_generic_to_shared(to)), "r"((unsigned)__cvta_generic_to_shared(&barrier)), "r"(rank)
      : "memory");
}
__forceinline__ __device__ void mhc_prefetch(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
#endif
"""


@T.macro
def gather_quad(value, quad, lane):
    """quad = the values of this lane and the three that share its four."""
    for e in T.unroll(4):
        quad[e] = T.shfl_sync(value[0], lane // 4 * 4 + e)


@T.macro
def send_quad(quad, buffer, index, barriers, at, to, rank):
    """buffer[index:index + 4] of block `to` = quad, counted at its barriers[at]; to be followed by `arrive`.

    Plainly in the own block: a GPU's memory checker calls a bulk copy there invalid, so an asynchronous store would
    hardly pass.
    """
    if to == rank:
        for e in T.vectorized(4):
            buffer[index + e] = quad[e]
    else:
        T.evaluate(
            T.call_extern(
                "handle",
                "mhc_send",
                quad[0],
                quad[1],
                quad[2],
                quad[3],
                T.access_ptr(buffer[index], "w", extent=4),
                barriers[at],
                to,
            )
        )


@T.macro
def arrive(barriers, at, announces, count):
    """A lane has done its own block's stores; the one that `announces` says how many bytes come from the others."""
    if announces:
        T.mbarrier_arrive_expect_tx(barriers[at], count)
    else:
        T.mbarrier_arrive(barriers[at])
