"""What the stages of the resident kernel share: sizes, a barrier, a prefetch, two bf16 of a register."""

from dataclasses import dataclass

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.parts import CLUSTER

TILE = 8  # tokens a cluster works on at a time, as many as a tensor core takes
WARPS = 16
THREADS = WARPS * 32
SLOTS = 8  # of partial sums; two warps share one
BATCH = 32  # steps whose comb is computed at once, a lane a token


# TileLang has no name for this instruction
PRELUDE = """
#if defined(__CUDACC__) && !defined(MHC_PREFETCH)  // once, where several kernels share a source
#define MHC_PREFETCH
__forceinline__ __device__ void mhc_prefetch(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes));
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


def first(pair):
    """The fp32 value of the first of two bf16 in a register."""
    return T.reinterpret(pair << T.uint32(16), "float32")


def second(pair):
    return T.reinterpret(T.bitwise_and(pair, T.uint32(0xFFFF0000)), "float32")
