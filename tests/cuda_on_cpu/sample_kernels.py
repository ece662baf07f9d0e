"""Small TileLang kernels, one feature of the emulator each."""
# mypy: ignore-errors

from typing import Any

import tilelang.language as T
from tvm import tirx


def add(width: int = 256) -> Any:
    """z = x + y on bf16 [T, width], 16-byte vectors, dynamic T."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def add_kernel(
        x: T.Tensor((tokens, width), "bfloat16"),
        y: T.Tensor((tokens, width), "bfloat16"),
        z: T.Tensor((tokens, width), "bfloat16"),
    ):
        with T.Kernel(tokens, threads=32) as row:
            for i in T.Parallel(width):
                z[row, i] = x[row, i] + y[row, i]

    return add_kernel


def softmax(width: int = 512) -> Any:
    """Row softmax by T.reduce_*: butterflies over warps and through shared memory."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def softmax_kernel(x: T.Tensor((tokens, width), "float32"), y: T.Tensor((tokens, width), "float32")):
        with T.Kernel(tokens, threads=128) as row:
            v = T.alloc_fragment((1, width), "float32")
            top = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            for i, j in T.Parallel(1, width):
                v[i, j] = x[row + i, j]
            T.reduce_max(v, top, dim=1)
            for i, j in T.Parallel(1, width):
                v[i, j] = T.exp(v[i, j] - top[i])
            T.reduce_sum(v, total, dim=1)
            for i, j in T.Parallel(1, width):
                y[row + i, j] = v[i, j] / total[i]

    return softmax_kernel


def reverse(width: int = 96) -> Any:
    """y = x reversed within a row, through shared memory twice: two barriers and a loop that reuses the buffer."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def reverse_kernel(x: T.Tensor((tokens, width), "float32"), y: T.Tensor((tokens, width), "float32")):
        with T.Kernel(1, threads=width):
            tid = T.get_thread_binding()
            buffer = T.alloc_shared((width,), "float32")
            for row in T.serial(tokens):
                buffer[tid] = x[row, tid]
                T.sync_threads()
                y[row, tid] = buffer[width - 1 - tid]
                T.sync_threads()

    return reverse_kernel


def warp_sums() -> Any:
    """out[0] = sum of the lanes by shuffles, out[1] = prefix sums, out[2] = lane 3's value."""

    @T.prim_func
    def warp_kernel(x: T.Tensor((64,), "float32"), out: T.Tensor((3, 64), "float32")):
        with T.Kernel(1, threads=64):
            tid = T.get_thread_binding()
            v = T.alloc_local((2,), "float32")
            v[0] = x[tid]
            out[0, tid] = T.warp_reduce_sum(v[0])
            for i in T.unroll(5):
                v[1] = T.shfl_up(v[0], 1 << i)
                if tid % 32 >= (1 << i):
                    v[0] += v[1]
            out[1, tid] = v[0]
            out[2, tid] = T.shfl_sync(x[tid], 3)

    return warp_kernel


def cluster_sum(width: int = 128) -> Any:
    """y[t, b] = sum of the four blocks' slices of row t, through distributed shared memory."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def cluster_kernel(x: T.Tensor((tokens, 4, width), "float32"), y: T.Tensor((tokens, 4, width), "float32")):
        with T.ClusterKernel(4, tokens, threads=width, cluster_dims=(4, 1, 1)) as (block, row):
            mine = T.alloc_shared((width,), "float32")
            all_blocks = T.alloc_shared((4, width), "float32")
            T.pdl_sync()
            for i in T.Parallel(width):
                mine[i] = x[row, block, i]
            T.cluster_sync()
            for rank in T.serial(4):
                T.copy_cluster(mine, all_blocks[T.block_rank_in_cluster(), 0:width], dst_block=rank)
            T.cluster_arrive()
            T.cluster_wait()
            for i in T.Parallel(width):
                y[row, block, i] = all_blocks[0, i] + all_blocks[1, i] + all_blocks[2, i] + all_blocks[3, i]

    return cluster_kernel


def bulk_repeat(width: int = 128, copies: int = 3) -> Any:
    """y [T, copies, width] = x repeated, by bulk copies out of two buffers: a row waits for the last but one's."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def repeat_kernel(x: T.Tensor((tokens, width), "float32"), y: T.Tensor((tokens, copies, width), "float32")):
        with T.Kernel(1, threads=width):
            tid = T.get_thread_binding()
            buffer = T.alloc_shared((2, width), "float32")
            for row in T.serial(tokens):
                if tid < copies:
                    T.tma_store_wait(1)
                T.sync_threads()
                buffer[row % 2, tid] = x[row, tid]
                T.fence_proxy_async()
                T.sync_threads()
                if tid < copies:
                    target = T.access_ptr(y[row, tid, 0], "w", extent=width)
                    source = T.access_ptr(buffer[row % 2, 0], "r", extent=width)
                    T.evaluate(
                        tirx.call_intrin("handle", tirx.op.Op.get("tl.tma_store"), target, source, width * 4, 0, 0)
                    )
                    T.tma_store_arrive()
            if tid < copies:
                T.tma_store_wait(0)

    return repeat_kernel


def cluster_send(width: int = 128) -> Any:
    """As `cluster_sum`, by bulk copies that an mbarrier in the receiving block counts; a warp of its own receives."""
    tokens = T.dynamic("tokens")
    threads = width + 32

    @T.prim_func
    def send_kernel(x: T.Tensor((tokens, 4, width), "float32"), y: T.Tensor((tokens, 4, width), "float32")):
        with T.ClusterKernel(4, threads=threads, cluster_dims=(4, 1, 1)) as block:
            tid = T.get_thread_binding()
            mine = T.alloc_shared((2, width), "float32")
            gathered = T.alloc_shared((2, 4, width), "float32")
            arrived = T.alloc_cluster_barrier([4, 4])
            for row in T.serial(tokens):
                if tid < width:
                    mine[row % 2, tid] = x[row, block, tid]
                    T.fence_proxy_async()
                    T.sync_threads(1, width)
                    if tid // 32 == block:
                        for i in T.serial(width // 32):
                            gathered[row % 2, block, i * 32 + tid % 32] = mine[row % 2, i * 32 + tid % 32]
                        T.sync_warp()
                        if tid % 32 == 0:
                            T.mbarrier_arrive(arrived[row % 2])
                    elif tid % 32 == 0:
                        T.evaluate(
                            tirx.call_intrin(
                                "handle",
                                tirx.op.Op.get("tl.tma_store_cluster"),
                                gathered.access_ptr("w", offset=(row % 2 * 4 + block) * width),
                                mine.access_ptr("r", offset=row % 2 * width),
                                tid // 32,
                                width * 4,
                                arrived[row % 2],
                            )
                        )
                    T.named_barrier_arrive(2, threads)
                else:
                    T.sync_threads(2, threads)
                    T.mbarrier_wait_parity(arrived[row % 2], row // 2 % 2)
                    for i in T.serial(width // 32):
                        col = i * 32 + tid - width
                        y[row, block, col] = (
                            gathered[row % 2, 0, col]
                            + gathered[row % 2, 1, col]
                            + gathered[row % 2, 2, col]
                            + gathered[row % 2, 3, col]
                        )
                T.sync_threads()
            T.cluster_sync()

    return send_kernel


def cluster_store(width: int = 128) -> Any:
    """As `cluster_sum`, by asynchronous stores of four floats, whose bytes an mbarrier there counts."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def store_kernel(x: T.Tensor((tokens, 4, width), "float32"), y: T.Tensor((tokens, 4, width), "float32")):
        with T.ClusterKernel(4, threads=width, cluster_dims=(4, 1, 1)) as block:
            tid = T.get_thread_binding()
            gathered = T.alloc_shared((2, 4, width), "float32")
            arrived = T.alloc_barrier([1, 1])
            quad = T.alloc_local((4,), "float32")
            T.cluster_sync()
            for row in T.serial(tokens):
                if tid < 32:
                    for e in T.vectorized(4):
                        quad[e] = x[row, block, tid * 4 + e]
                    for rank in T.serial(4):
                        if rank == block:
                            for e in T.vectorized(4):
                                gathered[row % 2, block, tid * 4 + e] = quad[e]
                        else:
                            T.evaluate(
                                T.call_extern(
                                    "handle",
                                    "mhc_send",
                                    quad[0],
                                    quad[1],
                                    quad[2],
                                    quad[3],
                                    T.access_ptr(gathered[row % 2, block, tid * 4], "w", extent=4),
                                    arrived[row % 2],
                                    rank,
                                )
                            )
                    T.sync_warp()
                    if tid == 0:
                        T.mbarrier_arrive_expect_tx(arrived[row % 2], 3 * 4 * width)
                T.mbarrier_wait_parity(arrived[row % 2], row // 2 % 2)
                y[row, block, tid] = (
                    gathered[row % 2, 0, tid]
                    + gathered[row % 2, 1, tid]
                    + gathered[row % 2, 2, tid]
                    + gathered[row % 2, 3, tid]
                )
                T.sync_threads()

    return store_kernel


def last_block_sum(blocks: int = 7) -> Any:
    """out[0] = sum(x): every block leaves a part; the last to draw an atomic ticket adds them in order."""

    @T.prim_func
    def last_block_kernel(
        x: T.Tensor((blocks, 32), "float32"),
        part: T.Tensor((blocks,), "float32"),
        ticket: T.Tensor((1,), "int32"),
        out: T.Tensor((1,), "float32"),
    ):
        with T.Kernel(blocks, threads=32) as block:
            tid = T.get_thread_binding()
            total = T.alloc_local((1,), "float32")
            mine = T.alloc_local((1,), "int32")
            total[0] = T.warp_reduce_sum(x[block, tid])
            if tid == 0:
                part[block] = total[0]
                mine[0] = T.atomic_add(ticket[0], 1, memory_order="acq_rel", return_prev=True)
                if mine[0] == blocks - 1:
                    total[0] = 0.0
                    for b in T.serial(blocks):
                        total[0] += part[b]
                    out[0] = total[0]

    return last_block_kernel


def grid_shift(blocks: int = 5) -> Any:
    """y[b] = x[b] + x[(b + 1) % blocks] + sum of all, through global memory and a grid barrier; the sum by atomics."""

    @T.prim_func
    def grid_kernel(
        x: T.Tensor((blocks,), "float32"),
        scratch: T.Tensor((blocks,), "float32"),
        total: T.Tensor((1,), "float32"),
        y: T.Tensor((blocks,), "float32"),
    ):
        with T.Kernel(blocks, threads=32) as block:
            tid = T.get_thread_binding()
            if tid == 0:
                scratch[block] = x[block]
                T.atomic_add(total[0], x[block])
            T.sync_grid()
            if tid == 0:
                y[block] = scratch[block] + scratch[(block + 1) % blocks] + total[0]

    return grid_kernel


def gemm(m: int = 128, n: int = 32, k: int = 256, dtype: str = "bfloat16", transpose_b: bool = True) -> Any:
    """c = a @ b (b given as [n, k] when transposed), tensor cores fed by a two-stage cp.async pipeline."""
    b_tile = (n, 64) if transpose_b else (64, n)

    @T.prim_func
    def gemm_kernel(
        a: T.Tensor((m, k), dtype),
        b: T.Tensor((n, k) if transpose_b else (k, n), dtype),
        c: T.Tensor((m, n), "float32"),
    ):
        with T.Kernel(m // 64, threads=128) as block:
            a_tile = T.alloc_shared((64, 64), dtype)
            b_shared = T.alloc_shared(b_tile, dtype)
            sums = T.alloc_fragment((64, n), "float32")
            T.clear(sums)
            for step in T.Pipelined(k // 64, num_stages=2):
                T.copy(a[block * 64, step * 64], a_tile)
                if transpose_b:
                    T.copy(b[0, step * 64], b_shared)
                else:
                    T.copy(b[step * 64, 0], b_shared)
                T.gemm(a_tile, b_shared, sums, transpose_B=transpose_b)
            T.copy(sums, c[block * 64, 0])

    return gemm_kernel


def two_kernels(width: int = 64) -> Any:
    """Two launches in one PrimFunc: half = x / 2, then y = half + 1."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def two(
        x: T.Tensor((tokens, width), "float32"),
        half: T.Tensor((tokens, width), "float32"),
        y: T.Tensor((tokens, width), "float32"),
    ):
        with T.Kernel(tokens, threads=width) as row:
            for i in T.Parallel(width):
                half[row, i] = x[row, i] * 0.5
        with T.Kernel(T.ceildiv(tokens, 2), threads=width) as pair:
            for r in T.serial(2):
                if pair * 2 + r < tokens:
                    for i in T.Parallel(width):
                        y[pair * 2 + r, i] = half[pair * 2 + r, i] + 1.0

    return two
