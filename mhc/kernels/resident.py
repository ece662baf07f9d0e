"""The pre on materialised streams in one launch, alone or behind a post, with the tile in registers and `fn` resident.

A block copies its slice of `fn` into shared memory once, by the copy engine, while its first streams load. The streams
live in the registers of the lanes that feed them to the tensor cores: a lane holds 8 adjacent columns of the same place
in every stream, so the post map before and the collapse behind need no other lane.

Letters: S = H / 8 columns a block; a group is 32 columns of every stream, a warp's work; a lane of a group has row
`lane / 4` of each 8 tokens and columns `8 * (lane % 4)` on.
"""

from dataclasses import dataclass

import tilelang.language as T
from tvm import tirx

from mhc.config import MHCConfig
from mhc.kernels.parts import CLUSTER, send, sigmoid
from mhc.kernels.sinkhorn import sinkhorn
from mhc.kernels.tensor import multiply

WARPS = 16
WORKERS = WARPS * 32
THREADS = WORKERS + 32  # the last warp fetches `fn` and computes comb
SLOTS = 8  # of partial sums; two warps share one


PRELUDE = """
__forceinline__ __device__ void mhc_prefetch(const void* from, unsigned bytes) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes));
#endif
}
"""


@dataclass(frozen=True)
class Shape:
    """Compile-time sizes.

    Args:
        config: shapes and constants.
        tile: tokens a cluster works on at a time, at most 32.
        rows: mixing rows computed.
        buffers: of what blocks send each other; one does if a second exchange follows.
    """

    config: MHCConfig
    tile: int
    rows: int
    buffers: int

    @property
    def streams(self) -> int:
        return self.config.hc_mult

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
        return -(-self.tile // 8)

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // 8)

    @property
    def sums(self) -> int:
        return self.rows + 1

    @property
    def wide(self) -> int:
        """Floats a token for the block that computes its post and comb: their rows and the sum of squares, padded."""
        return -(-(self.sums - self.streams) // 4) * 4

    @property
    def narrow(self) -> int:
        """Floats a token for every block: the pre rows and the sum of squares, padded."""
        return -(-(self.streams + 1) // 4) * 4

    @property
    def owned(self) -> int:
        """Tokens of a tile a block owns."""
        return -(-self.tile // CLUSTER)

    @property
    def padded(self) -> int:
        return -(-self.tile // 4) * 4


@T.macro
def sync():
    T.sync_threads(1, WORKERS)


@T.macro
def fetch_fn(shape, fn, fn_smem, full, rank, lane):
    """fn_smem[j, m, :] = this block's columns of stream j in row m; full[j] opens when a stream is there."""
    hc, rows, cols = shape.streams, shape.rows, shape.cols
    if lane == 0:
        for j in T.unroll(hc):
            T.mbarrier_arrive_expect_tx(full[j], rows * cols * 4)
    T.sync_warp()
    for i in T.serial(T.ceildiv(rows * hc, 32)):
        q = i * 32 + lane
        if q < rows * hc:
            T.evaluate(
                tirx.call_intrin(
                    "handle",
                    tirx.op.Op.get("tl.tma_load"),
                    T.access_ptr(fn_smem[q // rows, q % rows, 0], "w", extent=cols),
                    T.access_ptr(fn[q % rows, q // rows * shape.config.hidden_size + rank * cols], "r", extent=cols),
                    full[q // rows],
                    cols * 4,
                    0,
                )
            )


@T.macro
def prefetch(shape, source, o, r, rank, t0, tokens, lane):
    """Bring the slices of `o` and `r` of the tile that begins at t0 into the L2 cache. One warp."""
    cols = shape.cols
    sources = 1 if source == "post_pre_collapsed" else shape.streams
    if source.startswith("post_pre"):
        for i in T.serial(T.ceildiv(shape.tile, 32)):
            t = i * 32 + lane
            if t < shape.tile and t0 + t < tokens:
                bulk_prefetch(o[t0 + t, rank * cols], cols * 2)
    for i in T.serial(T.ceildiv(shape.tile * sources, 32)):
        t = (i * 32 + lane) // sources
        if t < shape.tile and t0 + t < tokens:
            bulk_prefetch(r[t0 + t, (i * 32 + lane) % sources, rank * cols], cols * 2)


def bulk_prefetch(at, count):
    return T.evaluate(T.call_extern("handle", "mhc_prefetch", T.access_ptr(at, "r", extent=count // 2), T.uint32(count)))


def first(pair):
    """The fp32 value of the first of two bf16 in a register."""
    return T.reinterpret(pair << T.uint32(16), "float32")


def second(pair):
    return T.reinterpret(T.bitwise_and(pair, T.uint32(0xFFFF0000)), "float32")


def four(buffer, index):
    """Four registers of a local buffer, as one vector."""
    return buffer[T.Ramp(index, 1, 4)]


@T.macro
def fill(shape, source, o, r, post, comb, out, x, square, rank, t0, tokens, tid):
    """x = the new streams of this lane's tokens and columns, also written to `out`; square = its sums of squares.

    The old streams load into the registers that will hold the new ones, all before the first is used.
    """
    hc, cols, eights = shape.streams, shape.cols, shape.eights
    lane = tid % 32
    warp = tid // 32
    collapsed = source == "post_pre_collapsed"
    sources = 1 if collapsed else hc
    is_post = source.startswith("post_pre")
    ob = T.alloc_local((shape.groups * eights * 4,), "uint32")
    kb = T.alloc_local((2,), "bfloat16")
    of = T.alloc_local((2,), "float32")
    rf = T.alloc_local((sources * 2,), "float32")
    p = T.alloc_local((hc,), "float32")
    c = T.alloc_local((hc * hc,), "float32")
    value = T.alloc_local((2,), "float32")
    for g in T.unroll(shape.groups):
        for h in T.unroll(eights):
            t = h * 8 + lane // 4
            col = (g * WARPS + warp) * 32 + lane % 4 * 8
            some = col < cols and t < shape.tile and t0 + t < tokens
            if is_post:
                ob[T.Ramp((g * eights + h) * 4, 1, 4)] = T.ldg128(o[t0 + t, rank * cols + col], pred=some)
            for j in T.unroll(sources):
                x[T.Ramp(((g * hc + j) * eights + h) * 4, 1, 4)] = T.ldg128(
                    r[t0 + t, j, rank * cols + col], pred=some
                )
    for h in T.unroll(eights):
        t = h * 8 + lane // 4
        square[h] = 0.0
        if is_post:
            for k in T.unroll(hc):
                p[k] = 0.0
            for k in T.unroll(hc * hc):
                c[k] = 0.0
            if t < shape.tile and t0 + t < tokens:
                for k in T.vectorized(hc) if hc % 2 == 0 else T.unroll(hc):
                    p[k] = post[t0 + t, k]
                if not collapsed:
                    for j in T.unroll(hc):
                        for k in T.vectorized(hc) if hc % 2 == 0 else T.unroll(hc):
                            c[j * hc + k] = comb[t0 + t, j * hc + k]
        for g in T.unroll(shape.groups):
            col = (g * WARPS + warp) * 32 + lane % 4 * 8
            if is_post:
                for q in T.unroll(4):
                    of[0] = first(ob[(g * eights + h) * 4 + q])
                    of[1] = second(ob[(g * eights + h) * 4 + q])
                    for j in T.unroll(sources):
                        rf[j * 2] = first(x[((g * hc + j) * eights + h) * 4 + q])
                        rf[j * 2 + 1] = second(x[((g * hc + j) * eights + h) * 4 + q])
                    for k in T.unroll(hc):
                        # r'[k] = post_k * o + sum_j comb[j, k] * r[j]
                        for e in T.unroll(2):
                            value[e] = p[k] * of[e]
                            if collapsed:
                                value[e] += rf[e]
                            else:
                                for j in T.unroll(hc):
                                    value[e] += c[j * hc + k] * rf[j * 2 + e]
                        for e in T.vectorized(2):
                            kb[e] = T.cast(value[e], "bfloat16")
                        x[((g * hc + k) * eights + h) * 4 + q] = T.reinterpret(kb[T.Ramp(0, 1, 2)], "uint32")
                if col < cols and t < shape.tile and t0 + t < tokens:
                    for k in T.unroll(hc):
                        T.stg128(out[t0 + t, k, rank * cols + col], four(x, ((g * hc + k) * eights + h) * 4))
            for k in T.unroll(hc):
                for q in T.unroll(4):
                    value[0] = first(x[((g * hc + k) * eights + h) * 4 + q])
                    value[1] = second(x[((g * hc + k) * eights + h) * 4 + q])
                    for e in T.unroll(2):
                        square[h] += value[e] * value[e]


@T.macro
def dot(shape, x, square, fn_smem, full, partial, warp_square, tid):
    """partial[slot] = the sums of two warps: their shares of `flat(r) @ fn.T` and of `sum(flat(r)^2)`.

    bf16 streams are exact in tf32; `fn` is split into its tf32 part and the rest. The tensor core truncates as it
    accumulates, so it only ever adds up 16 columns: all further sums are rounded fp32.

    Column c of a lane's 8 plays k = lane % 4 + 4 * (c % 2) of product c / 2: any order of k is right if both operands
    keep it.
    """
    hc, cols = shape.streams, shape.cols
    halves = T.ceildiv(shape.eights, 2)
    lane = tid % 32
    warp = tid // 32
    row = lane // 4
    quad = lane % 4
    turned = T.alloc_local((shape.eights * 4,), "uint32")
    a = T.alloc_local((halves * 16,), "float32")
    w = T.alloc_local((8,), "float32")
    high = T.alloc_local((8,), "float32")
    low = T.alloc_local((8,), "float32")
    acc = T.alloc_local((4,), "float32")
    total = T.alloc_local((shape.row_tiles * halves * 4,), "float32")
    for i in T.unroll(shape.row_tiles * halves * 4):
        total[i] = 0.0
    for i in T.unroll(halves * 16):
        a[i] = 0.0
    # A loop, or the compiler would put off all the additions and spill their operands; so `x` goes round, as registers
    # have no index.
    for unit in T.unroll(shape.groups * hc, unroll_factor=1):
        j = unit % hc
        T.mbarrier_wait_parity(full[j], 0)
        if True:
            col = (unit // hc * WARPS + warp) * 32 + quad * 8
            for h in T.unroll(shape.eights):
                for q in T.unroll(4):
                    a[h // 2 * 16 + q * 4 + h % 2] = first(x[h * 4 + q])
                    a[h // 2 * 16 + q * 4 + 2 + h % 2] = second(x[h * 4 + q])
                    turned[h * 4 + q] = x[h * 4 + q]
            for i in T.unroll((shape.groups * hc - 1) * shape.eights * 4):
                x[i] = x[i + shape.eights * 4]
            for i in T.unroll(shape.eights * 4):
                x[(shape.groups * hc - 1) * shape.eights * 4 + i] = turned[i]
            for n in T.unroll(shape.row_tiles):
                if cols % (32 * WARPS) != 0:
                    for e in T.unroll(8):
                        w[e] = 0.0
                if col < cols:
                    for half in T.unroll(2):
                        for e in T.vectorized(4):
                            w[half * 4 + e] = fn_smem[j, T.min(n * 8 + row, shape.rows - 1), col + half * 4 + e]
                for e in T.unroll(8):
                    # tf32 keeps 10 bits of mantissa
                    bits = T.bitwise_and(T.reinterpret(w[e], "uint32"), T.uint32(0xFFFFE000))
                    high[e] = T.reinterpret(bits, "float32")
                    low[e] = w[e] - high[e]
                for m in T.unroll(halves):
                    for half in T.unroll(2):
                        for e in T.unroll(4):
                            acc[e] = 0.0
                        for product in T.unroll(2):
                            multiply(a, m * 16 + (half * 2 + product) * 4, low, (half * 2 + product) * 2, acc, 0)
                            multiply(a, m * 16 + (half * 2 + product) * 4, high, (half * 2 + product) * 2, acc, 0)
                        for e in T.unroll(4):
                            total[(m * shape.row_tiles + n) * 4 + e] = total[(m * shape.row_tiles + n) * 4 + e] + acc[e]
    for h in T.unroll(shape.eights):
        square[h] = square[h] + T.shfl_xor(square[h], 1)
        square[h] = square[h] + T.shfl_xor(square[h], 2)
        if quad == 0 and h * 8 + row < shape.tile:
            warp_square[warp, h * 8 + row] = square[h]
    # warps w and w + 8 each hand the other one of every two sums
    slot = warp % SLOTS
    upper = warp // SLOTS
    for h in T.unroll(shape.eights):
        for n in T.unroll(shape.row_tiles):
            at = (h // 2 * shape.row_tiles + n) * 4 + h % 2 * 2
            if h * 8 + row < shape.tile:
                partial[slot, h * 8 + row, n * 8 + quad * 2 + 1 - upper] = T.if_then_else(
                    upper != 0, total[at], total[at + 1]
                )
    sync()
    for h in T.unroll(shape.eights):
        for n in T.unroll(shape.row_tiles):
            at = (h // 2 * shape.row_tiles + n) * 4 + h % 2 * 2
            kept = T.if_then_else(upper != 0, total[at + 1], total[at])
            if h * 8 + row < shape.tile:
                m = n * 8 + quad * 2 + upper
                partial[slot, h * 8 + row, m] = kept + partial[slot, h * 8 + row, m]
    sync()


@T.macro
def stage(shape, partial, warp_square, to_all, to_owner, buffer, parity, tid):
    """Add up the slots, and lay the sums out as they are sent."""
    hc, rows, sums = shape.streams, shape.rows, shape.sums
    value = T.alloc_local((1,), "float32")
    for i in T.unroll(T.ceildiv(shape.tile * sums, WORKERS)):
        q = i * WORKERS + tid
        if q < shape.tile * sums:
            t = q // sums
            m = q % sums
            if m < rows:
                value[0] = partial[0, t, m]
                for s in T.unroll(SLOTS - 1):
                    value[0] += partial[s + 1, t, m]
            else:
                value[0] = warp_square[0, t]
                for s in T.unroll(WARPS - 1):
                    value[0] += warp_square[s + 1, t]
            if m < hc:
                to_all[buffer, t, m] = value[0]
            elif m == rows:
                to_all[buffer, t, hc] = value[0]
            if rows > hc and m >= hc:
                to_owner[parity, t % CLUSTER, t // CLUSTER, m - hc] = value[0]
    T.fence_proxy_async()
    sync()


@T.macro
def pre_gates(shape, at_all, pre, scale, base, buffer, tid):
    """pre[t, :] from the sums of all blocks, one warp a token."""
    hc = shape.streams
    lane = tid % 32
    total = T.alloc_local((1,), "float32")
    for i in T.unroll(T.ceildiv(shape.tile, WARPS)):
        t = i * WARPS + tid // 32
        if t < shape.tile:
            total[0] = 0.0
            if lane <= hc:
                for b in T.unroll(CLUSTER):
                    total[0] += at_all[buffer, b, t, lane]
            mean_square = T.shfl_sync(total[0], hc) / (hc * shape.config.hidden_size)
            # m *= rsqrt(mean(flat(r)^2) + rms_eps);  pre = sigmoid(m * scale[0] + base) + pre_eps
            rstd = T.rsqrt(mean_square + shape.config.rms_eps)
            if lane < hc:
                pre[t, lane] = sigmoid(total[0] * rstd * scale[0] + base[lane]) + shape.config.pre_eps
    sync()


@T.macro
def collapse(shape, has_norm, x, pre, warp_square, own_square, square, squared, buffer, step, rank, tid):
    """x of stream 0 = y = bf16(sum_j pre_j * r_j); every block gets this one's `sum(y^2)`."""
    hc = shape.streams
    lane = tid % 32
    warp = tid // 32
    yb = T.alloc_local((2,), "bfloat16")
    y = T.alloc_local((2,), "float32")
    total = T.alloc_local((1,), "float32")
    gate = T.alloc_local((hc,), "float32")
    for h in T.unroll(shape.eights):
        t = h * 8 + lane // 4
        total[0] = 0.0
        if t < shape.tile:
            for j in T.unroll(hc):
                gate[j] = pre[t, j]
            for g in T.unroll(shape.groups):
                for q in T.unroll(4):
                    y[0] = 0.0
                    y[1] = 0.0
                    for j in T.unroll(hc):
                        y[0] += gate[j] * first(x[((g * hc + j) * shape.eights + h) * 4 + q])
                        y[1] += gate[j] * second(x[((g * hc + j) * shape.eights + h) * 4 + q])
                    for e in T.vectorized(2):
                        yb[e] = T.cast(y[e], "bfloat16")
                    x[(g * hc * shape.eights + h) * 4 + q] = T.reinterpret(yb[T.Ramp(0, 1, 2)], "uint32")
                    y[0] = first(x[(g * hc * shape.eights + h) * 4 + q])
                    y[1] = second(x[(g * hc * shape.eights + h) * 4 + q])
                    total[0] += y[0] * y[0]
                    total[0] += y[1] * y[1]
        if has_norm:
            total[0] = total[0] + T.shfl_xor(total[0], 1)
            total[0] = total[0] + T.shfl_xor(total[0], 2)
            if lane % 4 == 0 and t < shape.tile:
                warp_square[warp, t] = total[0]
    if has_norm:
        sync()
        if warp == 0:
            if lane < shape.tile:
                total[0] = warp_square[0, lane]
                for i in T.unroll(WARPS - 1):
                    total[0] += warp_square[i + 1, lane]
                own_square[lane] = total[0]
            T.fence_proxy_async()
            T.sync_warp()
            if lane < CLUSTER:
                send((own_square, square), shape.padded, rank * shape.padded, 0, squared[0], lane)


@T.macro
def write(shape, has_norm, x, square, squared, weight, layer_input, step, rank, t0, tokens, tid):
    """layer_input = y * rsqrt(mean(y^2) + norm_eps) * weight."""
    hc, cols = shape.streams, shape.cols
    lane = tid % 32
    warp = tid // 32
    wb = T.alloc_local((shape.groups * 4,), "uint32")
    zb = T.alloc_local((2,), "bfloat16")
    z = T.alloc_local((2,), "float32")
    total = T.alloc_local((1,), "float32")
    if has_norm:
        for g in T.unroll(shape.groups):
            col = (g * WARPS + warp) * 32 + lane % 4 * 8
            wb[T.Ramp(g * 4, 1, 4)] = T.ldg128(weight[rank * cols + col], pred=col < cols)
        T.mbarrier_wait_parity(squared[0], step % 2)
    for h in T.unroll(shape.eights):
        t = h * 8 + lane // 4
        if t < shape.tile and t0 + t < tokens:
            if has_norm:
                total[0] = 0.0
                for b in T.unroll(CLUSTER):
                    total[0] += square[b, t]
                total[0] = T.rsqrt(total[0] / shape.config.hidden_size + shape.config.norm_eps)
            for g in T.unroll(shape.groups):
                col = (g * WARPS + warp) * 32 + lane % 4 * 8
                if col < cols:
                    at = (g * hc * shape.eights + h) * 4
                    if has_norm:
                        for q in T.unroll(4):
                            z[0] = first(x[at + q]) * total[0] * first(wb[g * 4 + q])
                            z[1] = second(x[at + q]) * total[0] * second(wb[g * 4 + q])
                            for e in T.vectorized(2):
                                zb[e] = T.cast(z[e], "bfloat16")
                            x[at + q] = T.reinterpret(zb[T.Ramp(0, 1, 2)], "uint32")
                    T.stg128(layer_input[t0 + t, rank * cols + col], four(x, at))


@T.macro
def own_mixes(shape, at_owner, own, owned, scale, base, post, comb, step, last, rank, t0, tokens, lane):
    """post and comb of the tokens this block owns, by the last warp: one lane a token for comb."""
    hc = shape.streams
    parity = step % 2
    c = T.alloc_local((hc * hc,), "float32")
    total = T.alloc_local((1,), "float32")
    T.mbarrier_wait_parity(owned[parity], step // 2 % 2)
    sums = shape.sums - hc
    for i in T.unroll(T.ceildiv(shape.owned * sums, 32)):
        q = i * 32 + lane
        if q < shape.owned * sums:
            total[0] = 0.0
            for b in T.unroll(CLUSTER):
                total[0] += at_owner[parity, b, q // sums, q % sums]
            own[q // sums, q % sums] = total[0]
    T.sync_warp()
    if step < last:
        T.named_barrier_arrive(2, THREADS)  # two steps on, the sums are overwritten
    t = lane * CLUSTER + rank
    if lane < shape.owned and t < shape.tile and t0 + t < tokens:
        # m *= rsqrt(mean(flat(r)^2) + rms_eps)
        rstd = T.rsqrt(own[lane, sums - 1] / (hc * shape.config.hidden_size) + shape.config.rms_eps)
        for k in T.unroll(hc):
            # post = post_mult * sigmoid(m * scale[1] + base)
            z = own[lane, k] * rstd * scale[1] + base[hc + k]
            post[t0 + t, k] = shape.config.post_mult * sigmoid(z)
        for q in T.unroll(hc * hc):
            c[q] = own[lane, hc + q] * rstd * scale[2] + base[2 * hc + q]
        sinkhorn(shape, c)
        for i in T.unroll(hc):
            for j in T.vectorized(hc) if hc % 2 == 0 else T.unroll(hc):
                comb[t0 + t, i * hc + j] = c[i * hc + j]


def resident(config: MHCConfig, tile: int, clusters: int, has_norm: bool, source: str, ahead: bool = True):
    """As `streams`."""
    hidden, hc = config.hidden_size, config.hc_mult
    is_head = source == "head"
    rows = hc if is_head else config.mix_rows
    shape = Shape(config, tile, rows, 1 if has_norm else 2)
    scales = 1 if is_head else 3
    tokens = T.dynamic("tokens")

    @T.macro
    def body(o, r, old_post, old_comb, fn, scale, base, weight, out, post, comb, layer_input):
        with T.ClusterKernel(
            T.min(T.ceildiv(tokens, tile), clusters) * CLUSTER, cluster_dims=CLUSTER, threads=THREADS
        ) as block:
            if ahead:
                T.import_source(PRELUDE)
            tid = T.get_thread_binding()
            rank = block % CLUSTER
            # 4 floats of padding put the 8 rows of a tensor core fragment into different banks
            fn_smem = T.alloc_shared((hc, rows, shape.cols + 4), "float32")
            partial = T.alloc_shared((SLOTS, tile, shape.row_tiles * 8), "float32")
            to_all = T.alloc_shared((shape.buffers, tile, shape.narrow), "float32")
            at_all = T.alloc_shared((shape.buffers, CLUSTER, tile, shape.narrow), "float32")
            to_owner = T.alloc_shared((2, CLUSTER, shape.owned, shape.wide), "float32")
            at_owner = T.alloc_shared((2, CLUSTER, shape.owned, shape.wide), "float32")
            own = T.alloc_shared((shape.owned, shape.wide), "float32")
            pre = T.alloc_shared((tile, hc), "float32")
            warp_square = T.alloc_shared((WARPS, tile), "float32")
            own_square = T.alloc_shared((shape.padded,), "float32")
            square = T.alloc_shared((CLUSTER, shape.padded), "float32")
            full = T.alloc_barrier([1] * hc)
            arrived = T.alloc_cluster_barrier([CLUSTER, CLUSTER])
            owned = T.alloc_cluster_barrier([CLUSTER, CLUSTER])
            squared = T.alloc_cluster_barrier([CLUSTER])
            x = T.alloc_local((shape.groups * hc * shape.eights * 4,), "uint32")
            row_square = T.alloc_local((shape.eights,), "float32")

            T.pdl_sync()
            T.pdl_trigger()
            steps = T.ceildiv(T.ceildiv(tokens, tile) - block // CLUSTER, clusters)
            if tid >= WORKERS:
                fetch_fn(shape, fn, fn_smem, full, rank, tid - WORKERS)
            for step in T.serial(steps):
                t0 = (block // CLUSTER + step * clusters) * tile
                parity = step % 2
                buffer = step % shape.buffers
                if tid >= WORKERS:
                    if ahead:
                        prefetch(shape, source, o, r, rank, t0 + clusters * tile, tokens, tid - WORKERS)
                    if not is_head:
                        own_mixes(
                            shape,
                            at_owner,
                            own,
                            owned,
                            scale,
                            base,
                            post,
                            comb,
                            step,
                            steps - 1,
                            rank,
                            t0,
                            tokens,
                            tid - WORKERS,
                        )
                else:
                    fill(shape, source, o, r, old_post, old_comb, out, x, row_square, rank, t0, tokens, tid)
                    dot(shape, x, row_square, fn_smem, full, partial, warp_square, tid)
                    stage(shape, partial, warp_square, to_all, to_owner, buffer, parity, tid)
                    if not is_head:
                        if step > 0:
                            T.sync_threads(2, THREADS)
                    if tid % 32 == 0 and tid // 32 < CLUSTER:
                        size = tile * shape.narrow
                        send(
                            (to_all, at_all), size, (buffer * CLUSTER + rank) * size, buffer * size,
                            arrived[parity], tid // 32,
                        )
                        if not is_head:
                            share = shape.owned * shape.wide
                            send(
                                (to_owner, at_owner), share, (parity * CLUSTER + rank) * share,
                                (parity * CLUSTER + tid // 32) * share, owned[parity], tid // 32,
                            )
                    T.mbarrier_wait_parity(arrived[parity], step // 2 % 2)
                    pre_gates(shape, at_all, pre, scale, base, buffer, tid)
                    collapse(
                        shape, has_norm, x, pre, warp_square, own_square, square, squared, buffer, step, rank, tid
                    )
                    write(shape, has_norm, x, square, squared, weight, layer_input, step, rank, t0, tokens, tid)
            # a block outlives the copies that read its shared memory
            T.cluster_arrive_relaxed()
            T.cluster_wait()

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
