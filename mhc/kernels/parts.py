"""What kernels share: the copies between blocks, and the stages of `streams` from sums to gates, as TileLang macros.

A cluster of 8 blocks splits every row of H columns into 8 slices. Each block keeps its slice of its tokens in shared
memory, dots it with its slice of `fn`, and sends the partial sums to its peers through distributed shared memory: one
launch, no workspace, and a summation order that depends on H alone, so that a row's result is bitwise the same at every
T and in every variant.

That is `streams`: eight warps work on the tile and a ninth computes comb, so that Sinkhorn runs beside the stores of
its own tile and the loads and dots of the next. `two_launch` has the slices and their order of summation, without
clusters. `fused` and `quad` overlap their tiles and have stages of their own; they and `gather` take from here only
what needs no `Plan`. Every kernel is compiled with `PASS_CONFIGS`.

Letters: S = H / 8 columns a block; M mixing rows, of which the head has the first hc; one more row sums the squares.
"""

from dataclasses import dataclass

import tilelang.language as T
from tvm import tirx

from mhc.config import MHCConfig
from mhc.kernels.sinkhorn import sinkhorn

CLUSTER = 8
WARPS = 8
WORKERS = WARPS * 32
THREADS = WORKERS + 32  # the last warp computes comb
ARRIVALS = CLUSTER - 1 + 32  # at a barrier of `exchange`: the peers' copies, and the lanes that store the own sums

# Hand-placed barriers and copies: no bulk copies, warp specialisation or barriers of the compiler's own.
PASS_CONFIGS = {
    "tl.disable_tma_lower": True,
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,  # its liveness does not see other blocks' stores
    "tl.disable_safe_memory_legalize": True,  # every access here is within bounds; the tests on the CPU have red zones
}


@dataclass(frozen=True)
class Plan:
    """Compile-time sizes of a kernel of `streams` or `two_launch`.

    Args:
        config: shapes and constants.
        tile: tokens a cluster works on at a time.
        streams: 1 for an embedding, `hc` for materialised streams.
        rows: mixing rows computed: M, or `hc` (the head).
    """

    config: MHCConfig
    tile: int
    streams: int
    rows: int

    @property
    def cols(self) -> int:
        """S, the columns of a block: a multiple of 8, so rows move as 16-byte vectors."""
        return self.config.hidden_size // CLUSTER

    @property
    def vecs(self) -> int:
        return self.cols // 8

    @property
    def row_tiles(self) -> int:
        """Tiles of 8 rows of `fn`, as a tensor core takes them."""
        return -(-self.rows // 8)

    @property
    def steps(self) -> int:
        """Steps of 16 columns a warp that cover the block's columns."""
        return -(-self.streams * self.cols // (16 * WARPS))

    @property
    def warp_rows(self) -> int:
        """Rows of `fn` a warp dots on FMAs."""
        return -(-self.rows // WARPS)

    @property
    def chunks(self) -> int:
        """Steps of 128 columns (4 a lane) that cover a block's columns on FMAs."""
        return -(-self.cols // 128)

    @property
    def resident(self) -> bool:
        """Whether a lane keeps its share of `fn` in registers from tile to tile."""
        return self.chunks * self.warp_rows * 4 <= 48

    @property
    def registers(self) -> int:
        """Floats of `fn` that a lane holds on FMAs."""
        return (self.chunks if self.resident else 1) * self.warp_rows * 4

    @property
    def sums(self) -> int:
        """Values exchanged a token: the rows and the sum of squares."""
        return self.rows + 1

    @property
    def width(self) -> int:
        """`sums` with padding: the copy engine moves multiples of 16 bytes."""
        return -(-self.sums // 4) * 4


def flat(config: MHCConfig, tokens, post, comb):
    """post [T, hc, 1] and comb [T, hc, hc] as [T, hc] and [T, hc * hc].

    Parameters have the shapes that callers know: a view in torch takes a microsecond of host time, one here takes none.
    To be passed on as it is: TileLang would rename what is assigned to a variable.
    """
    hc = config.hc_mult
    return T.reshape(post, (tokens, hc)), T.reshape(comb, (tokens, hc * hc))


def shares_before(i, total, among):
    """Where the `i`th of `among` equal shares of `total` begins."""
    return i * (total // among) + T.min(i, total % among)


def copy_async(dst, src, count):
    """Start to copy `count` elements from global to shared memory, 4 to 16 bytes."""
    return T.ptx_cp_async(T.access_ptr(dst, "w", extent=count), T.access_ptr(src, "r", extent=count), count)


@T.macro
def send(buffer, count, dst, src, arrived, rank):
    """Copy `count` floats from flat `src` to flat `dst` of shared memory, in block `rank`, whose barrier counts them.

    The engine that copies carries its own completion: no fence waits for this block's stores to global memory, as a
    cluster barrier would. Each writer of `src` has called `T.fence_proxy_async` and met the caller since.
    """
    source, target = buffer
    T.evaluate(
        tirx.call_intrin(
            "handle",
            tirx.op.Op.get("tl.tma_store_cluster"),
            target.access_ptr("w", offset=dst),
            source.access_ptr("r", offset=src),
            rank,
            count * 4,
            arrived,
        )
    )


@T.macro
def sync_workers():
    T.sync_threads(1, WORKERS)


@T.macro
def exchange(plan, width, stage, part, arrived, step, rank, tid):
    """part[parity, rank] on every block of the cluster = this block's stage[parity] [tile, width]; waits for all eight.

    Both are double-buffered, which suffices: a block sends its next sums only after it has read these. Warp w sends to
    block w; the block's own sums are stored plainly, since the engine's target has to be another block, and every lane
    arrives for its own. `arrived` counts `ARRIVALS`.
    """
    size = plan.tile * width
    parity = step % 2
    lane = tid % 32
    if tid // 32 == rank:
        for i in T.unroll(T.ceildiv(size, 32)):
            if i * 32 + lane < size:
                t = (i * 32 + lane) // width
                m = (i * 32 + lane) % width
                part[parity, rank, t, m] = stage[parity, t, m]
        T.mbarrier_arrive(arrived[parity])
    elif lane == 0:
        send((stage, part), size, (parity * CLUSTER + rank) * size, parity * size, arrived[parity], tid // 32)
    T.mbarrier_wait_parity(arrived[parity], step // 2 % 2)


@T.macro
def add_parts(plan, part, sums, lead, t, row, lane):
    """sums[t, :] = sum over blocks of part[lead, block, row, :], in the order of the blocks. One warp."""
    total = T.alloc_local((1,), "float32")
    for q in T.unroll(T.ceildiv(plan.sums, 32)):
        m = q * 32 + lane
        if m < plan.sums:
            total[0] = 0.0
            for b in T.unroll(CLUSTER):
                total[0] += part[lead, b, row, m]
            sums[t, m] = total[0]
    T.sync_warp()


@T.macro
def mix(plan, part, sums, pre, scale, base, post, parity, rank, t0, tokens, tid):
    """Of every token of the tile, one warp a token: sums over blocks, the pre gates, and post.

    Every block does it, since each needs the gates; a token's post is written by the block of rank `t % CLUSTER`.
    """
    lane = tid % 32
    hc = plan.config.hc_mult
    for i in T.unroll(T.ceildiv(plan.tile, WARPS)):
        t = i * WARPS + tid // 32
        if t < plan.tile:
            add_parts(plan, part, sums, parity, t, t, lane)
            # m *= rsqrt(mean(flat(r)^2) + rms_eps)
            mean_square = sums[t, plan.rows] / (plan.streams * plan.config.hidden_size)
            rstd = T.rsqrt(mean_square + plan.config.rms_eps)
            if lane < hc:
                # pre = sigmoid(m * scale[0] + base) + pre_eps
                pre[t, lane] = sigmoid(sums[t, lane] * rstd * scale[0] + base[lane]) + plan.config.pre_eps
                if plan.rows > hc:  # noqa: SIM102 (known to the compiler, unlike the next)
                    # post = post_mult * sigmoid(m * scale[1] + base)
                    if t % CLUSTER == rank and t0 + t < tokens:
                        z = sums[t, hc + lane] * rstd * scale[1] + base[hc + lane]
                        post[t0 + t, lane] = plan.config.post_mult * sigmoid(z)


def sigmoid(z):
    return 1.0 / (1.0 + T.exp(-z))


@T.macro
def comb_warp(plan, part, own, arrived, scale, base, comb, step, rank, t0, tokens, lane):
    """comb = sinkhorn(m * scale[2] + base) of the tokens this block owns, by the ninth warp: one lane a token."""
    hc = plan.config.hc_mult
    owned = T.ceildiv(plan.tile, CLUSTER)
    c = T.alloc_local((hc * hc,), "float32")
    T.mbarrier_wait_parity(arrived[step % 2], step // 2 % 2)
    for i in T.unroll(owned):
        if i * CLUSTER + rank < plan.tile:
            add_parts(plan, part, own, step % 2, i, i * CLUSTER + rank, lane)
    T.named_barrier_arrive(2, THREADS)  # the sums may be overwritten
    t = lane * CLUSTER + rank
    if lane < owned and t < plan.tile and t0 + t < tokens:
        # m *= rsqrt(mean(flat(r)^2) + rms_eps)
        rstd = T.rsqrt(own[lane, plan.rows] / (plan.streams * plan.config.hidden_size) + plan.config.rms_eps)
        for q in T.unroll(hc * hc):
            c[q] = own[lane, 2 * hc + q] * rstd * scale[2] + base[2 * hc + q]
        sinkhorn(plan, c)
        for i in T.unroll(hc):
            for j in T.vectorized(hc) if hc % 2 == 0 else T.unroll(hc):
                comb[t0 + t, i * hc + j] = c[i * hc + j]
