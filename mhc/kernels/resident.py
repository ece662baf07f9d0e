"""The pre on materialised streams in one launch, alone or behind a post, with `fn` resident in shared memory.

A block copies its slice of `fn` into shared memory once. The streams live in the registers of the lanes that feed them
to the tensor cores: a lane holds 8 adjacent columns of the same place in every stream, so the post map before and the
collapse behind need no other lane.

Exchanges between the blocks of a cluster are off the chain. A step projects tile s, then collapses tile s - 1, whose
sums have arrived since, and writes tile s - 2, whose norm has. The streams are read again for the collapse, from the L2
cache: the registers are not many enough for two tiles.

Letters: S = H / 8 columns a block; a group is 32 columns of every stream, a warp's work; a lane of a group has row
`lane / 4` of each 8 tokens and columns `8 * (lane % 4)` on.
"""

from dataclasses import dataclass

import tilelang.language as T

from mhc.config import MHCConfig
from mhc.kernels.parts import CLUSTER, sigmoid
from mhc.kernels.sinkhorn import sinkhorn
from mhc.kernels.tensor import multiply

WARPS = 16
WORKERS = WARPS * 32
SLOTS = 8  # of partial sums; two warps share one


# TileLang has no names for these instructions. `mhc_send` stores a float in the shared memory of block `rank`, at the
# same place as here, and counts its bytes there at a barrier: no fence, no buffer to send from.
PRELUDE = """
#ifdef __CUDACC__
__forceinline__ __device__ void mhc_prefetch(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes));
}
template <class Barrier>
__forceinline__ __device__ void mhc_send(float value, const void* to, Barrier& barrier, int rank) {
  asm volatile(
      "{\\n"
      ".reg .b32 to, barrier;\\n"
      "mapa.shared::cluster.u32 to, %1, %3;\\n"
      "mapa.shared::cluster.u32 barrier, %2, %3;\\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %0, [barrier];\\n"
      "}\\n" ::"r"(__float_as_uint(value)), "r"((unsigned)__cvta_generic_to_shared(to)),
      "r"((unsigned)__cvta_generic_to_shared(&barrier)), "r"(rank) : "memory");
}
#endif
"""


@dataclass(frozen=True)
class Shape:
    """Compile-time sizes.

    Args:
        config: shapes and constants.
        tile: tokens a cluster works on at a time, 8 or 16: a tensor core takes 8.
        rows: mixing rows computed.
        source: see `streams`.
        spare: whether a warp beside the workers computes post and comb.
    """

    config: MHCConfig
    tile: int
    rows: int
    source: str
    spare: bool

    @property
    def threads(self) -> int:
        return WORKERS + 32 * self.spare

    @property
    def batch(self) -> int:
        """Steps whose comb is computed at once, a lane a token: a worker should seldom."""
        return 1 if self.spare else 32 // self.owned

    @property
    def streams(self) -> int:
        return self.config.hc_mult

    @property
    def is_post(self) -> bool:
        return self.source.startswith("post_pre")

    @property
    def sources(self) -> int:
        """Streams read: an embedding's are equal."""
        return 1 if self.source == "post_pre_collapsed" else self.streams

    @property
    def gates(self) -> int:
        """Floats a token of the post map: post and comb."""
        return (
            self.streams if self.source == "post_pre_collapsed" else self.streams * (1 + self.streams)
        ) * self.is_post

    @property
    def cols(self) -> int:
        return self.config.hidden_size // CLUSTER

    @property
    def groups(self) -> int:
        """Groups of 32 columns a warp."""
        return -(-self.cols // (32 * WARPS))

    @property
    def eights(self) -> int:
        """Rows of a tile a lane."""
        return self.tile // 8

    @property
    def row_tiles(self) -> int:
        """Tiles of 8 rows of `fn`."""
        return -(-self.rows // 8)

    @property
    def pairs(self) -> int:
        """Pairs of row tiles, which fill a tensor core's 16 rows."""
        return self.row_tiles // 2

    @property
    def totals(self) -> int:
        """Sums of a lane for 8 tokens."""
        return self.row_tiles * 2

    @property
    def mixes(self) -> int:
        """Floats a token for the block that computes its post and comb, of none or a multiple of 4."""
        return self.rows - self.streams

    @property
    def narrow(self) -> int:
        """Floats a token for every block: the pre rows and the sum of squares."""
        return self.streams + 1

    @property
    def owned(self) -> int:
        """Tokens of a tile a block owns: t = rank, rank + 8."""
        return self.tile // CLUSTER


def share(total, among, i):
    """Where the `i`th of `among` equal shares of `total` begins."""
    return i * (total // among) + T.min(i, total % among)


@T.macro
def sync():
    T.sync_threads(1, WORKERS)


@T.macro
def fetch_fn(shape, fn, fn_smem, rank, tid):
    """Start to copy this block's slice of `fn`, one stream after the other; a warp copies what it will read."""
    hc, rows, cols = shape.streams, shape.rows, shape.cols
    lane = tid % 32
    for j in T.unroll(hc):
        for g in T.unroll(shape.groups):
            for i in T.unroll(T.ceildiv(rows, 4)):
                m = i * 4 + lane // 8
                col = (g * WARPS + tid // 32) * 32 + lane % 8 * 4
                if m < rows and col < cols:
                    T.ptx_cp_async(
                        T.access_ptr(fn_smem[j, m, col], "w", extent=4),
                        T.access_ptr(fn[m, j * shape.config.hidden_size + rank * cols + col], "r", extent=4),
                        4,
                    )
        T.ptx_commit_group()


@T.macro
def prefetch(shape, o, r, rank, t0, end, warp, warps, lane):
    """Bring the slices of `o` and `r` of the tile that begins at t0 into the L2 cache, a warp every `warps`th token."""
    cols = shape.cols
    for i in T.serial(T.ceildiv(shape.tile, warps)):
        t = t0 + i * warps + warp
        if t < end and t < t0 + shape.tile:
            if lane < shape.sources:
                bulk_prefetch(r[T.cast(t, "int64"), lane, rank * cols], cols * 2)
            if shape.is_post:  # noqa: SIM102 (known to the compiler, unlike the next)
                if lane == shape.sources:
                    bulk_prefetch(o[T.cast(t, "int64"), rank * cols], cols * 2)


def bulk_prefetch(at, count):
    return T.evaluate(
        T.call_extern("handle", "mhc_prefetch", T.access_ptr(at, "r", extent=count // 2), T.uint32(count))
    )


def first(pair):
    """The fp32 value of the first of two bf16 in a register."""
    return T.reinterpret(pair << T.uint32(16), "float32")


def second(pair):
    return T.reinterpret(T.bitwise_and(pair, T.uint32(0xFFFF0000)), "float32")


def four(buffer, index):
    """Four registers of a local buffer, as one vector."""
    return buffer[T.Ramp(index, 1, 4)]


@T.macro
def load_gates(shape, post, comb, gates, step, t0, end, tid):
    """Start to copy gates[t] = post and comb of the post map."""
    hc = shape.streams
    vec = 4 if hc % 4 == 0 else 2 if hc % 2 == 0 else 1
    units = shape.gates // vec
    for i in T.unroll(T.ceildiv(shape.tile * units, WORKERS)):
        q = i * WORKERS + tid
        t = q // units
        k = q % units * vec
        if t < shape.tile and t0 + t < end:
            if k < hc:
                T.ptx_cp_async(
                    T.access_ptr(gates[step % 2, t, k], "w", extent=vec),
                    T.access_ptr(post[T.cast(t0 + t, "int64"), k], "r", extent=vec),
                    vec,
                )
            elif shape.gates > hc:
                T.ptx_cp_async(
                    T.access_ptr(gates[step % 2, t, k], "w", extent=vec),
                    T.access_ptr(comb[T.cast(t0 + t, "int64"), k - hc], "r", extent=vec),
                    vec,
                )
    T.ptx_commit_group()


@T.macro
def load(shape, count, source, x, rank, t0, end, tid):
    """x[group, stream, eight, :] = `count` streams of this lane's tokens and columns, pairs of bf16."""
    for g in T.unroll(shape.groups):
        col = (g * WARPS + tid // 32) * 32 + tid % 4 * 8
        for h in T.unroll(shape.eights):
            t = t0 + h * 8 + tid % 32 // 4
            for j in T.unroll(count):
                x[T.Ramp(((g * shape.streams + j) * shape.eights + h) * 4, 1, 4)] = T.ldg128(
                    source[t, j, rank * shape.cols + col], pred=col < shape.cols and t < end
                )


@T.macro
def load_o(shape, o, ob, rank, t0, end, tid):
    for g in T.unroll(shape.groups):
        col = (g * WARPS + tid // 32) * 32 + tid % 4 * 8
        for h in T.unroll(shape.eights):
            t = t0 + h * 8 + tid % 32 // 4
            ob[T.Ramp((g * shape.eights + h) * 4, 1, 4)] = T.ldg128(
                o[t, rank * shape.cols + col], pred=col < shape.cols and t < end
            )


@T.macro
def post_map(shape, x, ob, gates, out, step, rank, t0, end, tid):
    """x = the new streams of the old and of the output, in place, also written to `out`."""
    hc, cols, eights = shape.streams, shape.cols, shape.eights
    of = T.alloc_local((2,), "float32")
    rf = T.alloc_local((shape.sources * 2,), "float32")
    p = T.alloc_local((shape.gates,), "float32")
    kb = T.alloc_local((2,), "bfloat16")
    value = T.alloc_local((2,), "float32")
    for h in T.unroll(eights):
        t = h * 8 + tid % 32 // 4
        for k in T.unroll(shape.gates // hc):
            for e in T.vectorized(hc) if hc % 2 == 0 else T.unroll(hc):
                p[k * hc + e] = gates[step % 2, t, k * hc + e]
        for g in T.unroll(shape.groups):
            col = (g * WARPS + tid // 32) * 32 + tid % 4 * 8
            for q in T.unroll(4):
                of[0] = first(ob[(g * eights + h) * 4 + q])
                of[1] = second(ob[(g * eights + h) * 4 + q])
                for j in T.unroll(shape.sources):
                    rf[j * 2] = first(x[((g * hc + j) * eights + h) * 4 + q])
                    rf[j * 2 + 1] = second(x[((g * hc + j) * eights + h) * 4 + q])
                for k in T.unroll(hc):
                    # r'[k] = post_k * o + sum_j comb[j, k] * r[j]
                    for e in T.unroll(2):
                        value[e] = p[k] * of[e]
                        if shape.sources == 1:
                            value[e] += rf[e]
                        else:
                            for j in T.unroll(hc):
                                value[e] += p[(1 + j) * hc + k] * rf[j * 2 + e]
                    for e in T.vectorized(2):
                        kb[e] = T.cast(value[e], "bfloat16")
                    x[((g * hc + k) * eights + h) * 4 + q] = T.reinterpret(kb[T.Ramp(0, 1, 2)], "uint32")
            if col < cols and t0 + t < end:
                for k in T.unroll(hc):
                    T.stg128(out[t0 + t, k, rank * cols + col], four(x, ((g * hc + k) * eights + h) * 4))


@T.macro
def wait_stream(hc, j, k):
    """Wait until this lane's copies of stream j are there: the number of younger ones has to be a literal."""
    if k < hc:
        if j == k:
            T.ptx_wait_group(hc - 1 - k)
        wait_stream(hc, j, k + 1)


@T.macro
def dot(shape, x, fn_smem, total, square, tid):
    """total = this warp's share of `flat(r) @ fn.T`, square = this lane's of `sum(flat(r)^2)`.

    `fn` is the first operand, 8 tokens the second. bf16 streams are exact in tf32; `fn` is split into its tf32 part and
    the rest. The tensor core truncates as it accumulates, so it only ever adds up 16 columns, small products first: all
    further sums are rounded fp32.

    Column c of a lane's 8 plays k = lane % 4 + 4 * (c % 2) of product c / 2: any order of k is right if both operands
    keep it. A row tile without a partner stands above itself, its rest above its tf32 part.
    """
    hc, cols, pairs = shape.streams, shape.cols, shape.pairs
    odd = shape.row_tiles % 2
    row = tid % 32 // 4
    quad = tid % 4
    w = T.alloc_local((shape.row_tiles * 4,), "float32")
    rest = T.alloc_local((shape.row_tiles * 4,), "float32")
    high = T.alloc_local((pairs * 8 + odd * 8,), "float32")
    low = T.alloc_local((max(pairs * 8, 1),), "float32")
    b = T.alloc_local((4,), "float32")
    acc = T.alloc_local((4,), "float32")
    for i in T.unroll(shape.eights * shape.totals):
        total[i] = 0.0
    for h in T.unroll(shape.eights):
        square[h] = 0.0
    for j in T.unroll(hc):
        wait_stream(hc, j, 0)
        T.sync_warp()
        for g in T.unroll(shape.groups):
            for half in T.unroll(2):
                col = (g * WARPS + tid // 32) * 32 + quad * 8 + half * 4
                for n in T.unroll(shape.row_tiles):
                    if cols % (32 * WARPS) != 0:
                        for e in T.unroll(4):
                            w[n * 4 + e] = 0.0
                    if col < cols:
                        for e in T.vectorized(4):
                            w[n * 4 + e] = fn_smem[j, T.min(n * 8 + row, shape.rows - 1), col + e]
                    for e in T.unroll(4):
                        # tf32 keeps 10 bits of mantissa
                        bits = T.bitwise_and(T.reinterpret(w[n * 4 + e], "uint32"), T.uint32(0xFFFFE000))
                        rest[n * 4 + e] = w[n * 4 + e] - T.reinterpret(bits, "float32")
                        w[n * 4 + e] = T.reinterpret(bits, "float32")
                # a lane's registers for product p: column 2 p of the upper and the lower row, then column 2 p + 1
                for e in T.unroll(4):
                    for n in T.unroll(pairs * 2):
                        high[n // 2 * 8 + e * 2 + n % 2] = w[n * 4 + e]
                        low[n // 2 * 8 + e * 2 + n % 2] = rest[n * 4 + e]
                    if odd:
                        high[pairs * 8 + e * 2] = rest[pairs * 8 + e]
                        high[pairs * 8 + e * 2 + 1] = w[pairs * 8 + e]
                for h in T.unroll(shape.eights):
                    for p in T.unroll(2):
                        pair = x[((g * hc + j) * shape.eights + h) * 4 + half * 2 + p]
                        b[p * 2] = first(pair)
                        b[p * 2 + 1] = second(pair)
                    for e in T.unroll(4):
                        square[h] += b[e] * b[e]
                    for n in T.unroll(pairs):
                        for e in T.unroll(4):
                            acc[e] = 0.0
                        for p in T.unroll(2):
                            multiply(low, n * 8 + p * 4, b, p * 2, acc, 0)
                        for p in T.unroll(2):
                            multiply(high, n * 8 + p * 4, b, p * 2, acc, 0)
                        for e in T.unroll(4):
                            total[h * shape.totals + n * 4 + e] = total[h * shape.totals + n * 4 + e] + acc[e]
                    if odd:
                        for e in T.unroll(4):
                            acc[e] = 0.0
                        for p in T.unroll(2):
                            multiply(high, pairs * 8 + p * 4, b, p * 2, acc, 0)
                        for e in T.unroll(2):
                            total[h * shape.totals + pairs * 4 + e] = total[h * shape.totals + pairs * 4 + e] + (
                                acc[e] + acc[2 + e]
                            )
    for h in T.unroll(shape.eights):
        square[h] = square[h] + T.shfl_xor(square[h], 1)
        square[h] = square[h] + T.shfl_xor(square[h], 2)


@T.macro
def hand_over(shape, total, square, partial, row_square, tid):
    """The upper warps' sums into partial[warp - 8], every warp's squares into row_square."""
    warp = tid // 32
    if warp >= SLOTS:
        for h in T.unroll(shape.eights):
            for n in T.unroll(shape.row_tiles):
                for e in T.vectorized(2):
                    partial[warp - SLOTS, h, n * 8 + tid % 32 // 4, tid % 4 * 2 + e] = total[
                        h * shape.totals + n * 2 + e
                    ]
    if tid % 4 == 0:
        for h in T.unroll(shape.eights):
            row_square[warp, h * 8 + tid % 32 // 4] = square[h]


@T.macro
def add_own(shape, total, partial, tid):
    """The lower warps add theirs."""
    warp = tid // 32
    if warp < SLOTS:
        for h in T.unroll(shape.eights):
            for n in T.unroll(shape.row_tiles):
                for e in T.vectorized(2):
                    partial[warp, h, n * 8 + tid % 32 // 4, tid % 4 * 2 + e] = (
                        partial[warp, h, n * 8 + tid % 32 // 4, tid % 4 * 2 + e] + total[h * shape.totals + n * 2 + e]
                    )


def send(value, to, barrier, rank):
    return T.evaluate(T.call_extern("handle", "mhc_send", value, T.access_ptr(to, "w", extent=1), barrier, rank))


@T.macro
def send_sums(shape, partial, row_square, at_all, at_owner, arrived, step, count, rank, tid):
    """Add up the slots; the sums go to the blocks that need them."""
    hc, rows = shape.streams, shape.rows
    sums = rows + 1
    parity = step % 2
    value = T.alloc_local((1,), "float32")
    if tid == 0:
        own = T.ceildiv(count - rank, CLUSTER) if shape.mixes > 0 else 0
        T.mbarrier_arrive_expect_tx(arrived[parity], CLUSTER * 4 * (count * shape.narrow + own * shape.mixes))
    for i in T.unroll(T.ceildiv(shape.tile * sums, WORKERS)):
        q = i * WORKERS + tid
        t = q // (sums * 8) * 8 + q % 8
        m = q // 8 % sums
        if t < count:
            if m < rows:
                value[0] = partial[0, t // 8, m, t % 8]
                for s in T.unroll(SLOTS - 1):
                    value[0] += partial[s + 1, t // 8, m, t % 8]
            else:
                value[0] = row_square[0, t]
                for s in T.unroll(WARPS - 1):
                    value[0] += row_square[s + 1, t]
            if m < hc or m == rows:
                for b in T.unroll(CLUSTER):
                    send(value[0], at_all[parity, rank, T.min(m, hc), t], arrived[parity], b)
            elif shape.mixes > 0:
                send(value[0], at_owner[parity, rank, t // CLUSTER, m - hc], arrived[parity], t % CLUSTER)


@T.macro
def pre_gates(shape, at_all, pre, arrived, scale, base, step, count, tid):
    """pre[t, :] from the sums of all blocks, one warp a token."""
    hc = shape.streams
    lane = tid % 32
    parity = step % 2
    total = T.alloc_local((1,), "float32")
    factor = T.alloc_local((1,), "float32")
    bias = T.alloc_local((1,), "float32")
    factor[0] = scale[0]
    bias[0] = base[T.min(lane, hc - 1)]
    T.mbarrier_wait_parity(arrived[parity], step // 2 % 2)
    for i in T.unroll(T.ceildiv(shape.tile, WARPS)):
        t = i * WARPS + tid // 32
        if t < T.min(count, shape.tile):
            total[0] = 0.0
            if lane <= hc:
                for b in T.unroll(CLUSTER):
                    total[0] += at_all[parity, b, lane, t]
            mean_square = T.shfl_sync(total[0], hc) / (hc * shape.config.hidden_size)
            # m *= rsqrt(mean(flat(r)^2) + rms_eps);  pre = sigmoid(m * scale[0] + base) + pre_eps
            rstd = T.rsqrt(mean_square + shape.config.rms_eps)
            if lane < hc:
                pre[t, lane] = sigmoid(total[0] * rstd * factor[0] + bias[0]) + shape.config.pre_eps


@T.macro
def collapse(shape, has_norm, x, y, pre, y_square, tid):
    """y = bf16(sum_j pre_j * r_j); y_square[warp, :] = its sums of squares."""
    hc = shape.streams
    yb = T.alloc_local((2,), "bfloat16")
    value = T.alloc_local((2,), "float32")
    total = T.alloc_local((1,), "float32")
    gate = T.alloc_local((hc,), "float32")
    for h in T.unroll(shape.eights):
        t = h * 8 + tid % 32 // 4
        total[0] = 0.0
        for j in T.unroll(hc):
            gate[j] = pre[t, j]
        for g in T.unroll(shape.groups):
            for q in T.unroll(4):
                value[0] = 0.0
                value[1] = 0.0
                for j in T.unroll(hc):
                    value[0] += gate[j] * first(x[((g * hc + j) * shape.eights + h) * 4 + q])
                    value[1] += gate[j] * second(x[((g * hc + j) * shape.eights + h) * 4 + q])
                for e in T.vectorized(2):
                    yb[e] = T.cast(value[e], "bfloat16")
                y[(g * shape.eights + h) * 4 + q] = T.reinterpret(yb[T.Ramp(0, 1, 2)], "uint32")
                value[0] = first(y[(g * shape.eights + h) * 4 + q])
                value[1] = second(y[(g * shape.eights + h) * 4 + q])
                total[0] += value[0] * value[0]
                total[0] += value[1] * value[1]
        if has_norm:
            total[0] = total[0] + T.shfl_xor(total[0], 1)
            total[0] = total[0] + T.shfl_xor(total[0], 2)
            if tid % 4 == 0:
                y_square[tid // 32, t] = total[0]


@T.macro
def send_squares(shape, y_square, square, squared, step, count, rank, tid):
    """Every block gets this one's `sum(y^2)`. One warp."""
    lane = tid % 32
    parity = step % 2
    total = T.alloc_local((1,), "float32")
    if tid // 32 == SLOTS:
        if lane == 0:
            T.mbarrier_arrive_expect_tx(squared[parity], CLUSTER * 4 * count)
        if lane < count:
            total[0] = y_square[0, lane]
            for i in T.unroll(WARPS - 1):
                total[0] += y_square[i + 1, lane]
            for b in T.unroll(CLUSTER):
                send(total[0], square[parity, rank, lane], squared[parity], b)


@T.macro
def write(shape, has_norm, y, square, squared, weight, layer_input, step, rank, t0, end, tid):
    """layer_input = y * rsqrt(mean(y^2) + norm_eps) * weight."""
    cols = shape.cols
    parity = step % 2
    wb = T.alloc_local((shape.groups * 4,), "uint32")
    zb = T.alloc_local((2,), "bfloat16")
    z = T.alloc_local((2,), "float32")
    total = T.alloc_local((1,), "float32")
    if has_norm:
        for g in T.unroll(shape.groups):
            col = (g * WARPS + tid // 32) * 32 + tid % 4 * 8
            wb[T.Ramp(g * 4, 1, 4)] = T.ldg128(weight[rank * cols + col], pred=col < cols)
        T.mbarrier_wait_parity(squared[parity], step // 2 % 2)
    for h in T.unroll(shape.eights):
        t = h * 8 + tid % 32 // 4
        if has_norm:
            total[0] = 0.0
            for b in T.unroll(CLUSTER):
                total[0] += square[parity, b, t]
            total[0] = T.rsqrt(total[0] / shape.config.hidden_size + shape.config.norm_eps)
        for g in T.unroll(shape.groups):
            col = (g * WARPS + tid // 32) * 32 + tid % 4 * 8
            at = (g * shape.eights + h) * 4
            if has_norm:
                for q in T.unroll(4):
                    z[0] = first(y[at + q]) * total[0] * first(wb[g * 4 + q])
                    z[1] = second(y[at + q]) * total[0] * second(wb[g * 4 + q])
                    for e in T.vectorized(2):
                        zb[e] = T.cast(z[e], "bfloat16")
                    y[at + q] = T.reinterpret(zb[T.Ramp(0, 1, 2)], "uint32")
            if col < cols and t0 + t < end:
                T.stg128(layer_input[t0 + t, rank * cols + col], four(y, at))


@T.macro
def own_mixes(shape, at_all, at_owner, logits, arrived, scale, base, post, step, rank, t0, end, lane):
    """post of the tokens of a step that this block owns, and the logits of their comb. One warp."""
    hc, mixes = shape.streams, shape.mixes
    parity = step % 2
    rounds = -(-shape.owned * mixes // 32)
    factor = T.alloc_local((rounds,), "float32")
    bias = T.alloc_local((rounds,), "float32")
    total = T.alloc_local((1,), "float32")
    square = T.alloc_local((1,), "float32")
    for i in T.unroll(rounds):
        m = (i * 32 + lane) % mixes
        factor[i] = scale[T.if_then_else(m < hc, 1, 2)]
        bias[i] = base[hc + m]
    T.mbarrier_wait_parity(arrived[parity], step // 2 % 2)
    for i in T.unroll(rounds):
        q = i * 32 + lane
        m = q % mixes
        t = q // mixes * CLUSTER + rank
        if t < shape.tile and t0 + t < end:
            total[0] = 0.0
            square[0] = 0.0
            for b in T.unroll(CLUSTER):
                square[0] += at_all[parity, b, hc, t]
                total[0] += at_owner[parity, b, q // mixes, m]
            # m *= rsqrt(mean(flat(r)^2) + rms_eps)
            rstd = T.rsqrt(square[0] / (hc * shape.config.hidden_size) + shape.config.rms_eps)
            total[0] = total[0] * rstd * factor[i] + bias[i]
            if m < hc:
                # post = post_mult * sigmoid(m * scale[1] + base)
                post[t0 + t, m] = shape.config.post_mult * sigmoid(total[0])
            else:
                logits[step % shape.batch * shape.owned + q // mixes, m - hc] = total[0]
    T.sync_warp()


@T.macro
def own_comb(shape, logits, comb, step, rank, begin, end, lane):
    """comb = sinkhorn(logits) of the steps of a batch up to this one, one lane a token."""
    hc = shape.streams
    c = T.alloc_local((hc * hc,), "float32")
    ago = step % shape.batch - lane // shape.owned
    t = begin + (step - ago) * shape.tile + lane % shape.owned * CLUSTER + rank
    if ago >= 0 and t < end:
        for q in T.unroll(hc * hc):
            c[q] = logits[lane, q]
        sinkhorn(shape, c)
        for i in T.unroll(hc):
            for j in T.vectorized(hc) if hc % 2 == 0 else T.unroll(hc):
                comb[t, i * hc + j] = c[i * hc + j]
    T.sync_warp()  # the logits are overwritten next


def resident(config: MHCConfig, tile: int, clusters: int, has_norm: bool, source: str, spare: bool = True):
    """As `streams`; the clusters share the tokens equally, tile after tile.

    A block sends the sums of step s after it has read those of s - 1, so two buffers suffice: its peers have then read
    those of s - 2. The squares of s - 2 are read before the sums of s are sent, so two suffice for them too.
    """
    hidden, hc = config.hidden_size, config.hc_mult
    is_head = source == "head"
    rows = hc if is_head else config.mix_rows
    shape = Shape(config, tile, rows, source, spare and not is_head)
    scales = 1 if is_head else 3
    tokens = T.dynamic("tokens")

    @T.macro
    def body(o, r, old_post, old_comb, fn, scale, base, weight, out, post, comb, layer_input):
        with T.ClusterKernel(
            T.min(T.ceildiv(tokens, 4), clusters) * CLUSTER, cluster_dims=CLUSTER, threads=shape.threads
        ) as block:
            T.import_source(PRELUDE)
            tid = T.get_thread_binding()
            rank = block % CLUSTER
            # 4 floats of padding put the 8 rows of a tensor core fragment into different banks
            fn_smem = T.alloc_shared((hc, rows, shape.cols + 4), "float32")
            partial = T.alloc_shared((SLOTS, shape.eights, shape.row_tiles * 8, 8), "float32")
            at_all = T.alloc_shared((2, CLUSTER, shape.narrow, tile), "float32")
            at_owner = T.alloc_shared((2, CLUSTER, shape.owned, max(shape.mixes, 1)), "float32")
            logits = T.alloc_shared((shape.batch * shape.owned, hc * hc), "float32")
            gates = T.alloc_shared((2, tile, max(shape.gates, 4)), "float32")
            pre = T.alloc_shared((tile, hc), "float32")
            row_square = T.alloc_shared((WARPS, tile), "float32")
            y_square = T.alloc_shared((WARPS, tile), "float32")
            square = T.alloc_shared((2, CLUSTER, tile), "float32")
            arrived = T.alloc_barrier([1, 1])
            squared = T.alloc_barrier([1, 1])
            taken = T.alloc_barrier([WARPS])
            x = T.alloc_local((shape.groups * hc * shape.eights * 4,), "uint32")
            ob = T.alloc_local((shape.groups * shape.eights * 4,), "uint32")
            y = T.alloc_local((shape.groups * shape.eights * 4,), "uint32")
            total = T.alloc_local((shape.eights * shape.totals,), "float32")
            squares = T.alloc_local((shape.eights,), "float32")

            # a peer may send here once every block has initialised its barriers and arrived
            T.cluster_arrive_relaxed()
            T.pdl_sync()
            T.pdl_trigger()
            # kept, or every address would divide anew
            own_tokens = T.alloc_local((2,), "int32")
            launched = T.min(T.ceildiv(tokens, 4), clusters)
            own_tokens[0] = share(tokens, launched, block // CLUSTER)
            own_tokens[1] = share(tokens, launched, block // CLUSTER + 1)
            begin, end = own_tokens[0], own_tokens[1]
            steps = T.ceildiv(end - begin, tile)
            if tid >= WORKERS:
                if shape.spare:
                    T.cluster_wait()
                    for s in T.serial(steps):
                        t0 = begin + s * tile
                        prefetch(shape, o, r, rank, t0 + tile, end, 0, 1, tid - WORKERS)
                        own_mixes(
                            shape, at_all, at_owner, logits, arrived, scale, base, post, s, rank, t0, end, tid - WORKERS
                        )
                        if s < steps - 1:
                            T.named_barrier_arrive(2, shape.threads)  # the sums of this step may be overwritten
                        own_comb(shape, logits, comb, s, rank, begin, end, tid - WORKERS)
            else:
                if shape.is_post:
                    load_gates(shape, old_post, old_comb, gates, 0, begin, end, tid)
                    load_o(shape, o, ob, rank, begin, end, tid)
                load(shape, shape.sources, r, x, rank, begin, end, tid)
                sync()  # or the compiler puts off the loads
                fetch_fn(shape, fn, fn_smem, rank, tid)
                if shape.is_post:
                    T.ptx_wait_group(hc)
                    sync()
                for s in T.serial(steps + 2):
                    t0 = begin + s * tile
                    if s < steps:
                        if s + 1 < steps:
                            if not shape.spare:
                                prefetch(shape, o, r, rank, t0 + tile, end, tid // 32, WARPS, tid % 32)
                            if shape.is_post:
                                load_gates(shape, old_post, old_comb, gates, s + 1, t0 + tile, end, tid)
                        if shape.is_post:
                            post_map(shape, x, ob, gates, out, s, rank, t0, end, tid)
                        dot(shape, x, fn_smem, total, squares, tid)
                        if s > 0:
                            T.mbarrier_wait_parity(taken[0], (s - 1) % 2)
                        hand_over(shape, total, squares, partial, row_square, tid)
                    if s > 0 and s <= steps:
                        # this lane's own stores, or what it read before
                        load(shape, hc, out if shape.is_post else r, x, rank, t0 - tile, end, tid)
                        pre_gates(shape, at_all, pre, arrived, scale, base, s - 1, end - t0 + tile, tid)
                    if s <= steps:
                        sync()
                    if s > 1:
                        write(
                            shape,
                            has_norm,
                            y,
                            square,
                            squared,
                            weight,
                            layer_input,
                            s - 2,
                            rank,
                            t0 - 2 * tile,
                            end,
                            tid,
                        )
                    if s > 0 and s <= steps:
                        collapse(shape, has_norm, x, y, pre, y_square, tid)
                        if not shape.spare and not is_head:  # noqa: SIM102
                            if tid // 32 == WARPS - 1:
                                own_mixes(
                                    shape,
                                    at_all,
                                    at_owner,
                                    logits,
                                    arrived,
                                    scale,
                                    base,
                                    post,
                                    s - 1,
                                    rank,
                                    t0 - tile,
                                    end,
                                    tid % 32,
                                )
                    if s < steps:
                        add_own(shape, total, partial, tid)
                        if s + 1 < steps:
                            if shape.is_post:
                                load_o(shape, o, ob, rank, t0 + tile, end, tid)
                            load(shape, shape.sources, r, x, rank, t0 + tile, end, tid)
                    # the sums of s - 1 may be overwritten once those of s have been sent
                    if shape.spare and s > 0 and s < steps:
                        T.sync_threads(2, shape.threads)
                    elif s <= steps:
                        sync()
                    if s < steps:
                        if s == 0:
                            T.cluster_wait()
                        send_sums(
                            shape, partial, row_square, at_all, at_owner, arrived, s, T.min(end - t0, tile), rank, tid
                        )
                        T.sync_warp()
                        if tid % 32 == 0:
                            T.mbarrier_arrive(taken[0])
                    if s > 0 and s <= steps:
                        if has_norm:
                            send_squares(
                                shape, y_square, square, squared, s - 1, T.min(end - t0 + tile, tile), rank, tid
                            )
                        if not shape.spare and not is_head:  # noqa: SIM102
                            if tid // 32 == WARPS - 1 and (s == steps or s % shape.batch == 0):
                                own_comb(shape, logits, comb, s - 1, rank, begin, end, tid % 32)
            # every block has waited for all that was sent to it, so none has to outlive the others

    # a tensor type a parameter: TileLang names a buffer after its parameter
    def tensor(*dims, dtype="float32"):
        return lambda: T.Tensor(dims, dtype)

    stream_type, row_type = tensor(tokens, hc, hidden, dtype="bfloat16"), tensor(tokens, hidden, dtype="bfloat16")
    post_type, comb_type = tensor(tokens, hc), tensor(tokens, hc * hc)
    fn_type, weight_type = tensor(rows, hc * hidden), tensor(hidden, dtype="bfloat16")
    scale_type, base_type = tensor(scales), tensor(rows)

    if is_head:

        @T.prim_func
        def head_kernel(
            r: stream_type(), fn: fn_type(), scale: scale_type(), base: base_type(), layer_input: row_type()
        ):
            body(r, r, base, base, fn, scale, base, r, r, base, base, layer_input)

        return head_kernel
    if source == "pre":

        @T.prim_func
        def pre_kernel(
            r: stream_type(),
            fn: fn_type(),
            scale: scale_type(),
            base: base_type(),
            weight: weight_type(),
            post: post_type(),
            comb: comb_type(),
            layer_input: row_type(),
        ):
            body(r, r, base, base, fn, scale, base, weight, r, post, comb, layer_input)

        return pre_kernel

    if source == "post_pre_collapsed":

        @T.prim_func
        def post_pre_collapsed_kernel(
            o: row_type(),
            x: T.Tensor((tokens, 1, hidden), "bfloat16"),
            old_post: post_type(),
            fn: fn_type(),
            scale: scale_type(),
            base: base_type(),
            weight: weight_type(),
            out: stream_type(),
            post: post_type(),
            comb: comb_type(),
            layer_input: row_type(),
        ):
            body(o, x, old_post, base, fn, scale, base, weight, out, post, comb, layer_input)

        return post_pre_collapsed_kernel

    @T.prim_func
    def post_pre_kernel(
        o: row_type(),
        r: stream_type(),
        old_post: post_type(),
        old_comb: comb_type(),
        fn: fn_type(),
        scale: scale_type(),
        base: base_type(),
        weight: weight_type(),
        out: stream_type(),
        post: post_type(),
        comb: comb_type(),
        layer_input: row_type(),
    ):
        body(o, r, old_post, old_comb, fn, scale, base, weight, out, post, comb, layer_input)

    return post_pre_kernel
