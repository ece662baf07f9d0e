"""Small kernels of several blocks: sums and copies over a cluster, and copies to global memory."""
# mypy: ignore-errors

from typing import Any

import tilelang.language as T
from tvm import tirx


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
