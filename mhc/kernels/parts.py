"""The stages that the one-launch kernels share, as TileLang macros.

A cluster of 8 blocks owns `tile` tokens and splits every row of H columns into 8 slices. Each block keeps its slice of
the streams in shared memory, dots it with its slice of `fn`, and sends the partial sums to all eight through
distributed shared memory: one launch, no workspace, and a summation order that depends on H alone, so that a row's
result is bitwise the same at every T and in every variant.

Letters: S = H / 8 columns a block; M mixing rows, here any of pre, post and comb; one more row holds the sum of squares.
"""

from dataclasses import dataclass

import tilelang.language as T
from tvm import tirx

from mhc.config import MHCConfig

CLUSTER = 8
THREADS = 256
WARPS = THREADS // 32

# SIMT code with hand-placed barriers: no bulk copies, no warp specialisation, no barriers of the compiler's own.
PASS_CONFIGS = {
    "tl.disable_tma_lower": True,
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,
}


@dataclass(frozen=True)
class Plan:
    """Compile-time sizes of a one-launch kernel.

    Args:
        config: shapes and constants.
        tile: tokens a cluster works on at a time.
        streams: 1 for an embedding, `hc` for materialised streams.
        rows: mixing rows computed: M, `2 hc` (no comb) or `hc` (the head).
        clusters: most clusters launched; they stride over the tiles.
    """

    config: MHCConfig
    tile: int
    streams: int
    rows: int
    clusters: int

    @property
    def cols(self) -> int:
        """S, the columns of a block: a multiple of 8, so rows move as 16-byte vectors."""
        return self.config.hidden_size // CLUSTER

    @property
    def vecs(self) -> int:
        return self.cols // 8

    @property
    def col_groups(self) -> int:
        """Warps that share a row of `fn`: many streams are split over two halves to halve shared-memory reads."""
        return 1 if self.streams == 1 else 2

    @property
    def row_groups(self) -> int:
        """Groups of warps that split the rows of `fn` between them."""
        return WARPS // self.col_groups

    @property
    def warp_rows(self) -> int:
        """Rows of `fn` a warp dots."""
        return -(-self.rows // self.row_groups)

    @property
    def chunks(self) -> int:
        """Steps of 128 columns (4 a lane) that cover a warp's columns."""
        return -(-self.streams * self.cols // (128 * self.col_groups))

    @property
    def sums(self) -> int:
        """Values exchanged a token: the rows and the sum of squares."""
        return self.rows + 1


def remote_store(buffer, index, value, block):
    """Store `value` at flat `index` of block `block`'s copy of a shared buffer."""
    op = tirx.op.Op.get("tl.ptx_cluster_store")
    return tirx.call_intrin("handle", op, buffer.access_ptr(2), value, block, index)


@T.macro
def dot_tile(plan, tile_smem, fn, acc, square, rank, tid):
    """Per-lane partial dots: acc[t, m] of this warp's rows of `fn`, and square[t] of the tokens this warp squares."""
    lane = tid % 32
    half = tid // 32 % plan.col_groups
    row0 = tid // 32 // plan.col_groups * plan.warp_rows
    w = T.alloc_local((plan.warp_rows * 4,), "float32")
    xb = T.alloc_local((4,), "bfloat16")
    xf = T.alloc_local((4,), "float32")
    for i in T.unroll(plan.tile * plan.warp_rows):
        acc[i] = 0.0
    for t in T.unroll(plan.tile):
        square[t] = 0.0
    for chunk in T.serial(plan.chunks):
        col = ((chunk * plan.col_groups + half) * 32 + lane) * 4
        if col < plan.streams * plan.cols:
            fn_col = (col // plan.cols) * plan.config.hidden_size + rank * plan.cols + col % plan.cols
            for m in T.unroll(plan.warp_rows):
                for e in T.vectorized(4):
                    w[m * 4 + e] = fn[T.min(row0 + m, plan.rows - 1), fn_col + e]
            for t in T.unroll(plan.tile):
                for e in T.vectorized(4):
                    xb[e] = tile_smem[t, col + e]
                for e in T.unroll(4):
                    xf[e] = T.cast(xb[e], "float32")
                # m = flat(r) @ fn.T
                for m in T.unroll(plan.warp_rows):
                    for e in T.unroll(4):
                        acc[t * plan.warp_rows + m] += w[m * 4 + e] * xf[e]
                # sum(flat(r)^2): every row group sees all columns; one of them, by token, squares them
                if t % plan.row_groups == tid // 32 // plan.col_groups:
                    for e in T.unroll(4):
                        square[t] += xf[e] * xf[e]


@T.macro
def exchange(plan, acc, square, part, parity, rank, tid):
    """part[parity, rank * col_groups + half, t, :] on every block of the cluster = this warp's sums over its lanes."""
    lane = tid % 32
    half = tid // 32 % plan.col_groups
    row0 = tid // 32 // plan.col_groups * plan.warp_rows
    total = T.alloc_local((1,), "float32")
    for t in T.unroll(plan.tile):
        slot = ((parity * CLUSTER + rank) * plan.col_groups + half) * plan.tile + t
        for m in T.unroll(plan.warp_rows):
            total[0] = T.warp_reduce_sum(acc[t * plan.warp_rows + m])
            if lane < CLUSTER and row0 + m < plan.rows:
                remote_store(part, slot * plan.sums + row0 + m, total[0], lane)
        if t % plan.row_groups == tid // 32 // plan.col_groups:
            total[0] = T.warp_reduce_sum(square[t])
            if lane < CLUSTER:
                remote_store(part, slot * plan.sums + plan.rows, total[0], lane)


@T.macro
def project(plan, tile_smem, fn, part, parity, rank, tid):
    """Dot the tile with this block's slice of `fn` and send the sums to the whole cluster."""
    acc = T.alloc_local((plan.tile * plan.warp_rows,), "float32")
    square = T.alloc_local((plan.tile,), "float32")
    dot_tile(plan, tile_smem, fn, acc, square, rank, tid)
    exchange(plan, acc, square, part, parity, rank, tid)


@T.macro
def add_parts(plan, part, sums, lead, t, row, lane):
    """sums[t, :] = sum over slices of part[lead, slice, row, :], in the one order every kernel keeps."""
    total = T.alloc_local((1,), "float32")
    for q in T.unroll(T.ceildiv(plan.sums, 32)):
        m = q * 32 + lane
        if m < plan.sums:
            total[0] = 0.0
            for b in T.unroll(CLUSTER * plan.col_groups):
                total[0] += part[lead, b, row, m]
            sums[t, m] = total[0]


@T.macro
def mix(plan, part, sums, pre, mean, scale, base, post, parity, rank, t0, tokens, tid):
    """Per token of the tile: `sums` [tile, sums] over blocks, `mean(flat(r)^2)`, the pre gates, and post to global memory.

    One warp a token. Every block does it for every token, since each needs the gates; a token's post is written by the
    block whose rank is `t % CLUSTER`.
    """
    lane = tid % 32
    warp = tid // 32
    hc = plan.config.hc_mult
    for i in T.unroll(T.ceildiv(plan.tile, WARPS)):
        t = i * WARPS + warp
        if t < plan.tile:
            add_parts(plan, part, sums, parity, t, t, lane)
            T.sync_warp()
            # m *= rsqrt(mean(flat(r)^2) + rms_eps)
            mean_square = sums[t, plan.rows] / (plan.streams * plan.config.hidden_size)
            rstd = T.rsqrt(mean_square + plan.config.rms_eps)
            if lane < hc:
                # pre = sigmoid(m * scale[0] + base) + pre_eps
                pre[t, lane] = sigmoid(sums[t, lane] * rstd * scale[0] + base[lane]) + plan.config.pre_eps
                if plan.rows >= 2 * hc:
                    # post = post_mult * sigmoid(m * scale[1] + base)
                    if t % CLUSTER == rank and t0 + t < tokens:
                        z = sums[t, hc + lane] * rstd * scale[1] + base[hc + lane]
                        post[t0 + t, lane] = plan.config.post_mult * sigmoid(z)
            if lane == 0:
                mean[t] = mean_square


def sigmoid(z):
    return 1.0 / (1.0 + T.exp(-z))


@T.macro
def write_comb(plan, sums, mean, scale, base, comb, rank, t0, tokens, lane):
    """comb = sinkhorn(m * scale[2] + base) of the tokens this block owns, one lane a token: one warp calls it."""
    hc = plan.config.hc_mult
    c = T.alloc_local((hc * hc,), "float32")
    t = lane * CLUSTER + rank
    if t < plan.tile and t0 + t < tokens:
        rstd = T.rsqrt(mean[t] + plan.config.rms_eps)
        for q in T.unroll(hc * hc):
            c[q] = sums[t, 2 * hc + q] * rstd * scale[2] + base[2 * hc + q]
        sinkhorn(plan, c)
        for q in T.unroll(hc * hc):
            comb[t0 + t, q] = c[q]


@T.macro
def sinkhorn(plan, c):
    """c[hc * hc] logits -> doubly stochastic, one thread a token.

    Kept as `diag(u) K diag(v)`: only u and v change, so no element is rounded more than once. Stops when two
    iterations together changed no bit: then no later pair of them can.
    """
    hc = plan.config.hc_mult
    eps = plan.config.sinkhorn_eps
    u = T.alloc_local((hc,), "float32")
    v = T.alloc_local((hc,), "float32")
    old = T.alloc_local((2 * hc,), "float32")
    s = T.alloc_local((1,), "float32")
    moving = T.alloc_local((1,), "int32")
    for i in T.unroll(hc):
        # K = softmax(c, rows) + eps
        s[0] = c[i * hc]
        for j in T.unroll(hc - 1):
            s[0] = T.max(s[0], c[i * hc + j + 1])
        for j in T.unroll(hc):
            c[i * hc + j] = T.exp(c[i * hc + j] - s[0])
        s[0] = 0.0
        for j in T.unroll(hc):
            s[0] += c[i * hc + j]
        for j in T.unroll(hc):
            c[i * hc + j] = c[i * hc + j] / s[0] + eps
        u[i] = 1.0
    for j in T.unroll(hc):
        # c /= colsum(c) + eps
        s[0] = 0.0
        for i in T.unroll(hc):
            s[0] += c[i * hc + j]
        v[j] = 1.0 / (s[0] + eps)
    for _ in T.unroll((plan.config.sinkhorn_iters - 1) % 2):
        sinkhorn_step(hc, eps, c, u, v, s)
    moving[0] = 1
    for _ in T.serial((plan.config.sinkhorn_iters - 1) // 2):
        if moving[0] != 0:
            for i in T.unroll(hc):
                old[i] = u[i]
                old[hc + i] = v[i]
            sinkhorn_step(hc, eps, c, u, v, s)
            sinkhorn_step(hc, eps, c, u, v, s)
            moving[0] = 0
            for i in T.unroll(hc):
                if old[i] != u[i] or old[hc + i] != v[i]:
                    moving[0] = 1
    for i in T.unroll(hc):
        for j in T.unroll(hc):
            c[i * hc + j] = u[i] * c[i * hc + j] * v[j]


@T.macro
def sinkhorn_step(hc, eps, c, u, v, s):
    for i in T.unroll(hc):
        # c /= rowsum(c) + eps
        s[0] = 0.0
        for j in T.unroll(hc):
            s[0] += c[i * hc + j] * v[j]
        u[i] = u[i] / (u[i] * s[0] + eps)
    for j in T.unroll(hc):
        # c /= colsum(c) + eps
        s[0] = 0.0
        for i in T.unroll(hc):
            s[0] += c[i * hc + j] * u[i]
        v[j] = v[j] / (v[j] * s[0] + eps)
