"""Small kernels of asynchronous copies: sums over the blocks of a cluster, and loads by one warp for another."""
# mypy: ignore-errors

from typing import Any

import tilelang.language as T

from mhc.kernels.parts import copy_async, send
from mhc.kernels.remote import arrive, send_quad


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
                        at = (row % 2 * 4 + block) * width
                        send((mine, gathered), width, at, row % 2 * width, arrived[row % 2], tid // 32)
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
            gathered = T.alloc_shared((2 * 4 * width,), "float32")
            arrived = T.alloc_barrier([32, 32])
            quad = T.alloc_local((4,), "float32")
            T.cluster_sync()
            for row in T.serial(tokens):
                if tid < 32:
                    for e in T.vectorized(4):
                        quad[e] = x[row, block, tid * 4 + e]
                    at = (row % 2 * 4 + block) * width + tid * 4
                    for rank in T.serial(4):
                        send_quad(quad, gathered, at, arrived, row % 2, rank, block)
                    arrive(arrived, row % 2, tid == 0, 3 * 4 * width)
                T.mbarrier_wait_parity(arrived[row % 2], row // 2 % 2)
                first = row % 2 * 4 * width + tid
                y[row, block, tid] = (
                    gathered[first]
                    + gathered[first + width]
                    + gathered[first + 2 * width]
                    + gathered[first + 3 * width]
                )
                T.sync_threads()

    return store_kernel


def relay() -> Any:
    """y [rows, 128] = x: one warp loads rows, each lane arriving as its copy lands; another stores them."""
    rows = T.dynamic("rows")

    @T.prim_func
    def kernel(x: T.Tensor((rows, 128), "float32"), y: T.Tensor((rows, 128), "float32")):
        with T.Kernel(1, threads=64):
            tid = T.get_thread_binding()
            slots = T.alloc_shared((2, 128), "float32")
            loaded = T.alloc_barrier([32] * 2)
            used = T.alloc_barrier([32] * 2)
            if tid < 32:
                for row in T.serial(rows):
                    if row > 1:
                        T.mbarrier_wait_parity(used[row % 2], (row // 2 + 1) % 2)
                    copy_async(slots[row % 2, tid * 4], x[row, tid * 4], 4)
                    T.cp_async_barrier_noinc(loaded[row % 2])
            else:
                for row in T.serial(rows):
                    T.mbarrier_wait_parity(loaded[row % 2], row // 2 % 2)
                    for e in T.unroll(4):  # what other lanes loaded
                        y[row, e * 32 + tid - 32] = slots[row % 2, e * 32 + tid - 32]
                    T.mbarrier_arrive(used[row % 2])

    return kernel
