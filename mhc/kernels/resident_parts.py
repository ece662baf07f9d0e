"""What the stages of the resident kernel share: sizes, barriers, and stores into other blocks' shared memory."""

from dataclasses import dataclass

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.parts import CLUSTER

TILE = 8  # tokens a cluster works on at a time, as many as a tensor core takes
WARPS = 16
THREADS = WARPS * 32
SLOTS = 8  # of partial sums; two warps share one
BATCH = 32  # steps whose comb is computed at once, a lane a token


# TileLang has no names for these instructions. `mhc_send` stores four floats in the shared memory of block `rank`, at
# the same place as here, and counts their bytes there at a barrier: no fence, no buffer to send from.
PRELUDE = """
#if defined(__CUDACC__) && !defined(MHC_RESIDENT)  // once, where several kernels share a source
#define MHC_RESIDENT
__forceinline__ __device__ void mhc_prefetch(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes));
}
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
#endif
"""


@dataclass(frozen=True)
class Shape:
    """Compile-time sizes.

    Args:
        config: shapes and constants; at most 32 columns a warp and 4 streams.
        source: see `resident`.
    """

    config: MHCConfig
    source: str

    @property
    def streams(self) -> int:
        return self.config.hc_mult

    @property
    def rows(self) -> int:
        return self.config.mix_rows

    @property
    def cols(self) -> int:
        """S, the columns of a block: a multiple of 8."""
        return self.config.hidden_size // CLUSTER

    @property
    def is_post(self) -> bool:
        return self.source == "post_pre"

    @property
    def gates(self) -> int:
        """Floats a token of the post map: post and comb."""
        if not self.is_post:
            return 0
        return self.streams * (1 + self.streams)

    @property
    def row_tiles(self) -> int:
        """Tiles of 8 rows of `fn`."""
        return -(-self.rows // 8)

    @property
    def pairs(self) -> int:
        """Pairs of row tiles, which fill a tensor core's 16 rows."""
        return self.row_tiles // 2

    @property
    def common(self) -> int:
        """Sums a token for every block: the pre rows and the squares."""
        return self.streams + 1

    @property
    def mixes(self) -> int:
        """Sums a token for the block that owns it: the rows of post and comb."""
        return self.rows - self.streams

    @property
    def mixes_sent(self) -> int:
        """`mixes`, filled up to a multiple of 4."""
        return -(-self.mixes // 4) * 4

    @property
    def common_warps(self) -> int:
        """Warps that send the sums for every block."""
        return -(-self.common * TILE // 32)

    @property
    def senders(self) -> int:
        """Warps that send sums."""
        return self.common_warps + self.mixes_sent // 4


@T.macro
def sync():
    T.sync_threads(1, THREADS)


def share(total, among, i):
    """Where the `i`th of `among` equal shares of `total` begins."""
    return i * (total // among) + T.min(i, total % among)


def first(pair):
    """The fp32 value of the first of two bf16 in a register."""
    return T.reinterpret(pair << T.uint32(16), "float32")


def second(pair):
    return T.reinterpret(T.bitwise_and(pair, T.uint32(0xFFFF0000)), "float32")


@T.macro
def gather_quad(value, quad, lane):
    """quad = the values of this lane and the three that share its four."""
    for e in T.unroll(4):
        quad[e] = T.shfl_sync(value[0], lane // 4 * 4 + e)


@T.macro
def send_quad(quad, buffer, index, barriers, parity, to, rank):
    """buffer[index:index + 4] of block `to` = quad, plainly in the own block; to be followed by `arrive`.

    A GPU's memory checker calls a bulk copy to the own block invalid, so an asynchronous store would hardly pass.
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
                barriers[parity],
                to,
            )
        )


@T.macro
def arrive(barriers, parity, announces, count, lane):
    """A warp has done its own block's stores; the one that `announces` says how many bytes come from the others."""
    T.sync_warp()
    if lane == 0:
        if announces:
            T.mbarrier_arrive_expect_tx(barriers[parity], count)
        else:
            T.mbarrier_arrive(barriers[parity])
