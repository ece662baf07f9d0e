"""Small TileLang kernels, one feature of the emulator each."""
# mypy: ignore-errors

from typing import Any

import tilelang.language as T


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
