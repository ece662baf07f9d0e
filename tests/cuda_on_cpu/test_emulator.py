"""The emulator itself: what it runs is right, and what it promises to catch it catches."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from . import runner, sample_clusters, sample_kernels
from .lowering import SIMT, lower
from .runner import Emulated, KernelError, emulated, poisoned, run, still_poisoned

SEEDS = (0, 1, 2, 3)
BF16, FP32 = torch.bfloat16, torch.float32
NO_AUTO_SYNC = {**SIMT, "tl.disable_thread_storage_sync": True}


@pytest.fixture(scope="module", name="kernel")
def _kernel() -> Callable[..., Any]:
    """Sample kernels by name and arguments, each traced once."""
    made: dict[Any, Any] = {}

    def get(name: str, *args: Any) -> Any:
        if (name, args) not in made:
            module = sample_clusters if hasattr(sample_clusters, name) else sample_kernels
            made[name, args] = getattr(module, name)(*args)
        return made[name, args]

    return get


def random(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_elementwise_bf16_is_torchs(kernel: Any, tokens: int, seed: int) -> None:
    x, y = random(tokens, 256, dtype=BF16), random(tokens, 256, dtype=BF16).flip(0)
    z = poisoned(tokens, 256, dtype=BF16)
    run(kernel("add"), seed, x=x, y=y, z=z)
    assert torch.equal(z, x + y)


@pytest.mark.parametrize("seed", SEEDS)
def test_reductions(kernel: Any, seed: int) -> None:
    x, y = 4 * random(3, 512), poisoned(3, 512, dtype=FP32)
    run(kernel("softmax"), seed, x=x, y=y)
    torch.testing.assert_close(y, torch.softmax(x.double(), -1).float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_and_shared_memory(kernel: Any, seed: int) -> None:
    x, y = random(3, 96), poisoned(3, 96, dtype=FP32)
    run(kernel("reverse"), seed, x=x, y=y)
    assert torch.equal(y, x.flip(1))


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles(kernel: Any, seed: int) -> None:
    x, out = torch.arange(64.0), poisoned(3, 64, dtype=FP32)
    run(kernel("warp_sums"), seed, x=x, out=out)
    warps = x.view(2, 32)
    assert torch.equal(out[0].view(2, 32), warps.sum(1, keepdim=True).expand(2, 32))
    assert torch.equal(out[1].view(2, 32), warps.cumsum(1))
    assert torch.equal(out[2].view(2, 32), warps[:, 3:4].expand(2, 32))


@pytest.mark.parametrize("seed", SEEDS)
def test_clusters_and_distributed_shared_memory(kernel: Any, seed: int) -> None:
    x, y = random(3, 4, 128), poisoned(3, 4, 128, dtype=FP32)
    run(kernel("cluster_sum"), seed, x=x, y=y)
    assert torch.equal(y, (x[:, 0] + x[:, 1] + x[:, 2] + x[:, 3]).unsqueeze(1).expand(3, 4, 128))


@pytest.mark.parametrize("name", ["cluster_send", "cluster_store"])
@pytest.mark.parametrize("seed", range(6))
def test_bulk_copies_asynchronous_stores_and_mbarriers(kernel: Any, seed: int, name: str) -> None:
    x, y = random(5, 4, 128), poisoned(5, 4, 128, dtype=FP32)
    run(kernel(name), seed, pass_configs=NO_AUTO_SYNC, x=x, y=y)
    assert torch.equal(y, (x[:, 0] + x[:, 1] + x[:, 2] + x[:, 3]).unsqueeze(1).expand(5, 4, 128))


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_atomic_tickets(kernel: Any, seed: int, concurrent: bool) -> None:
    x, part, out = random(7, 32), poisoned(7, dtype=FP32), poisoned(1, dtype=FP32)
    ticket = torch.zeros(1, dtype=torch.int32)
    run(kernel("last_block_sum"), seed, concurrent=concurrent, x=x, part=part, ticket=ticket, out=out)
    assert ticket.item() == 7
    torch.testing.assert_close(out[0], x.double().sum().float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_grid_barrier(kernel: Any, seed: int) -> None:
    x, scratch, y, total = torch.arange(5.0), poisoned(5, dtype=FP32), poisoned(5, dtype=FP32), torch.zeros(1)
    run(kernel("grid_shift"), seed, x=x, scratch=scratch, total=total, y=y)
    assert torch.equal(y, x + x.roll(-1) + 10)


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_tensor_cores_and_async_copies(kernel: Any, seed: int, transpose_b: bool) -> None:
    a, b, c = random(128, 256, dtype=BF16), random(32, 256, dtype=BF16), poisoned(128, 32, dtype=FP32)
    prim_func = kernel("gemm", 128, 32, 256, "bfloat16", transpose_b)
    assert all(name in emulated(prim_func).source for name in ("mma_sync", "ldmatrix", "cp_async_wait"))
    run(prim_func, seed, a=a, b=b if transpose_b else b.T.contiguous(), c=c)
    torch.testing.assert_close(c, (a.double() @ b.double().T).float(), rtol=0, atol=5e-5)


def test_tf32_tensor_cores_drop_mantissa_bits(kernel: Any) -> None:
    a, b, c = random(64, 64), random(16, 64), poisoned(64, 16, dtype=FP32)
    run(kernel("gemm", 64, 16, 64, "float32"), 0, a=a, b=b, c=c)
    a32, b32 = ((t.view(torch.int32) & ~0x1FFF).view(FP32).double() for t in (a, b))
    torch.testing.assert_close(c, (a32 @ b32.T).float(), rtol=0, atol=1e-5)
    assert (c - a @ b.T).abs().max() > 1e-3


@pytest.mark.parametrize("tokens", [1, 3])
def test_launches_of_one_function_run_in_order(kernel: Any, tokens: int) -> None:
    x, half, y = random(tokens, 64), poisoned(tokens, 64, dtype=FP32), poisoned(tokens, 64, dtype=FP32)
    run(kernel("two_kernels"), 0, x=x, half=half, y=y)
    assert torch.equal(y, x * 0.5 + 1)


def test_portable_switch_agrees(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*runner._flags(), "-DEMU_PORTABLE_SWITCH"]
    monkeypatch.setattr(runner, "_flags", lambda: flags)
    x, y = random(3, 96), poisoned(3, 96, dtype=FP32)
    Emulated(lower(kernel("reverse"), NO_AUTO_SYNC))(2, x=x, y=y)
    assert torch.equal(y, x.flip(1))


# ---- planted bugs ----


def removed(text: str, occurrence: int = 0) -> Callable[[str], str]:
    """An edit that removes one occurrence of a line of code from the kernel's body."""

    def edit(source: str) -> str:
        at = [match.start() for match in re.finditer(re.escape(text), source)][occurrence]
        return source[:at] + source[at + len(text) :]

    return edit


def replaced(pattern: str, by: str) -> Callable[[str], str]:
    return lambda source: re.sub(pattern, by, source)


def outcome(broken: Emulated, want: dict[str, Tensor], **inputs: Tensor) -> str:
    """Run under every seed until something is noticed; say what, or `unnoticed`."""
    for seed in SEEDS:
        outputs = {name: poisoned(*t.shape, dtype=t.dtype) for name, t in want.items()}
        try:
            broken(seed, concurrent=False, **inputs, **outputs)
        except KernelError as error:
            return str(error)
        for name, tensor in outputs.items():
            if still_poisoned(tensor):
                return "poison"
            if not torch.allclose(tensor.float(), want[name].float(), rtol=1e-4, atol=1e-3):
                return "poison" if tensor.isnan().any() else "wrong"
    return "unnoticed"


@pytest.mark.parametrize("barrier", [0, 1])
def test_every_removed_barrier_is_noticed(kernel: Any, barrier: int) -> None:
    x = random(4, 96)
    edit = removed("__syncthreads();", barrier)
    broken = Emulated(lower(kernel("reverse"), NO_AUTO_SYNC), edit)
    assert broken.source.count("__syncthreads();") == 1
    assert outcome(broken, {"y": x.flip(1)}, x=x) in ("poison", "wrong")


def test_a_removed_pipeline_barrier_or_wait_is_noticed(kernel: Any) -> None:
    a, b = random(128, 256, dtype=BF16), random(32, 256, dtype=BF16)
    want = {"c": (a.double() @ b.double().T).float()}
    for edit in (
        removed("__syncthreads();", 0),
        removed("__syncthreads();", 1),
        removed("tl::cp_async_wait<1>();"),
        replaced(r"cp_async_wait<1>", "cp_async_wait<2>"),
    ):
        assert outcome(Emulated(lower(kernel("gemm"), SIMT), edit), want, a=a, b=b) in ("poison", "wrong")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (replaced(r"(y\[.*\]) = ", r"(&\1)[96 * 3] = "), r"bytes into y, which has 1152"),
        (replaced(r"(y\[.*\]) = ", r"(&\1)[-1] = "), r"y was written outside"),
        (replaced(r"= (x\[.*\]);", r"= (&\1)[1 << 20];"), r"bytes into x, which has 1152"),
        (
            replaced(r"buffer\[\(\(int\)threadIdx.x\)\] =", "buffer[threadIdx.x + 1] ="),
            "wrote byte 384 of its 384 bytes of shared",
        ),
    ],
    ids=["past the end", "before the start", "far away", "shared memory"],
)
def test_a_wrong_index_is_noticed(kernel: Any, edit: Callable[[str], str], says: str) -> None:
    x = random(3, 96)
    assert re.search(says, outcome(Emulated(lower(kernel("reverse"), NO_AUTO_SYNC), edit), {"y": x.flip(1)}, x=x))


def test_a_read_just_outside_is_poison(kernel: Any) -> None:
    x = random(3, 96)
    broken = Emulated(lower(kernel("reverse"), NO_AUTO_SYNC), replaced(r"= (x\[.*\]);", r"= (&\1)[-1];"))
    assert outcome(broken, {"y": x.flip(1)}, x=x) == "poison"


def test_a_divergent_barrier_is_named(kernel: Any) -> None:
    x = random(1, 96)
    lowered = lower(kernel("reverse"), NO_AUTO_SYNC)
    half = Emulated(lowered, replaced(r"__syncthreads\(\);", "if (threadIdx.x < 32) __syncthreads();"))
    says = outcome(half, {"y": x.flip(1)}, x=x)
    assert re.search(
        r"deadlock in block \(0,0,0\): of 96 threads 64 exited, 32 wait at __syncthreads \(line \d+\)", says
    )
    assert re.search(r"line \d+: if \(threadIdx.x < 32\) __syncthreads", says)
    split = "if (threadIdx.x < 32)\n __syncthreads();\n else\n __syncthreads();"
    both = Emulated(lowered, replaced(r"__syncthreads\(\);", split))
    assert "divergent barrier" in outcome(both, {"y": x.flip(1)}, x=x)


def test_a_missing_cluster_barrier_is_noticed(kernel: Any) -> None:
    x = random(2, 4, 128)
    want = {"y": x.sum(1, keepdim=True).expand(2, 4, 128)}
    first = Emulated(lower(kernel("cluster_sum"), SIMT), removed("tl::cluster_sync();"))
    assert "has not started" in outcome(first, want, x=x)
    second = Emulated(lower(kernel("cluster_sum"), SIMT), replaced(r"tl::cluster_(arrive|wait)\(\);", ""))
    assert outcome(second, want, x=x) in ("poison", "wrong") or "has exited" in outcome(second, want, x=x)
    unpaired = Emulated(lower(kernel("cluster_sum"), SIMT), removed("tl::cluster_arrive();"))
    assert "cluster_wait without a cluster_arrive" in outcome(unpaired, want, x=x)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (replaced(r"arrived\[.*\]\.wait\(.*\);", ""), "poison|wrong|more arrivals"),
        (replaced(r"\.init\(4\)", ".init(5)"), "wait at mbarrier"),
        (replaced(r"\.init\(4\)", ".init(3)"), "poison|wrong|more arrivals"),
        (replaced(r"arrived\[.\]\.init\(4\);", ""), "before its init"),
        (replaced(r"(tl::__sync_thread_partial\(1, 128\);)", ""), "poison|wrong"),
        (replaced(r"(?s)tl::cluster_sync\(\);(?!.*tl::cluster_sync)", ""), "has exited|block exited"),
        (replaced(r"\(uint32_t\)\(512\)", "(uint32_t)(520)"), "units of 16 bytes"),
        (replaced(r", \(int\)[^,]*, (\(uint32_t\)\(512\))", r", (int)blockIdx.x, \1"), "another block"),
    ],
    ids=["wait", "too many", "too few", "init", "source", "exit", "size", "itself"],
)
def test_a_broken_bulk_copy_is_noticed(kernel: Any, edit: Callable[[str], str], says: str) -> None:
    x = random(5, 4, 128)
    want = {"y": x.sum(1, keepdim=True).expand(5, 4, 128)}
    assert re.search(says, outcome(Emulated(lower(kernel("cluster_send"), NO_AUTO_SYNC), edit), want, x=x))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (replaced(r"arrived\[.*\]\.wait\(.*\);", ""), "poison|wrong|more arrivals"),
        (replaced(r"expect_tx\(1536\)", "expect_tx(1552)"), "wait at mbarrier"),
        (replaced(r"expect_tx\(1536\)", "expect_tx(1520)"), "poison|wrong|has exited|wait at mbarrier"),
        (replaced(r"tl::cluster_sync\(\);", ""), "has not started|before its init"),
        (replaced(r"mhc_send\((.*), \(&\(", r"mhc_send(\1, 1 + (&("), "aligned to 16 bytes"),
        (replaced(r"(mhc_send\(.*), \w+\);", r"\1, blockIdx.x);"), "another block"),
    ],
    ids=["wait", "too many", "too few", "start", "alignment", "itself"],
)
def test_a_broken_asynchronous_store_is_noticed(kernel: Any, edit: Callable[[str], str], says: str) -> None:
    x = random(5, 4, 128)
    want = {"y": x.sum(1, keepdim=True).expand(5, 4, 128)}
    assert re.search(says, outcome(Emulated(lower(kernel("cluster_store"), NO_AUTO_SYNC), edit), want, x=x))


def test_an_uninitialised_local_is_noticed(kernel: Any) -> None:
    a, b = random(128, 256, dtype=BF16), random(32, 256, dtype=BF16)
    broken = Emulated(lower(kernel("gemm"), SIMT), replaced(r"\*\(float4\*\)\(sums \+ .*", ""))
    assert outcome(broken, {"c": (a.double() @ b.double().T).float()}, a=a, b=b) == "wrong"


def test_waiting_for_a_block_that_never_runs_is_named(kernel: Any) -> None:
    spin = replaced(r"(int mine\[1\];|mine\[0\] = )", r"while (tl_other(ticket)) {} \1")
    prefix = "static bool tl_other(int* t) { return AtomicLoad(t, 0) != 7; }\n"
    x = random(7, 32)
    broken = Emulated(lower(kernel("last_block_sum"), SIMT), lambda s: prefix + spin(s))
    with pytest.raises(KernelError, match="concurrent=True"):
        broken(0, x=x, part=torch.zeros(7), ticket=torch.zeros(1, dtype=torch.int32), out=torch.zeros(1))


def test_an_empty_grid_is_refused_as_by_the_driver(kernel: Any) -> None:
    x = torch.empty(0, 256, dtype=BF16)
    with pytest.raises(KernelError, match=r"grid \[0, 1, 1\] is empty"):
        run(kernel("add"), x=x, y=x.clone(), z=x.clone())


def test_bad_tensors_are_refused(kernel: Any) -> None:
    x = random(2, 256, dtype=BF16)
    with pytest.raises(ValueError, match=r"y must be bfloat16 \['tokens', 256\], got float32 \[2, 256\]"):
        run(kernel("add"), x=x, y=x.float(), z=x)
    with pytest.raises(ValueError, match=r"y must be bfloat16 \['tokens', 256\], got bfloat16 \[3, 256\]"):
        run(kernel("add"), x=x, y=random(3, 256, dtype=BF16), z=x)
    with pytest.raises(ValueError, match="tensors must be x, y, z, got x, y"):
        run(kernel("add"), x=x, y=x)
    with pytest.raises(ValueError, match="z must be a contiguous CPU tensor"):
        run(kernel("add"), x=x, y=x, z=random(256, 2, dtype=BF16).T)


def test_an_unknown_intrinsic_is_named(kernel: Any) -> None:
    with pytest.raises(NotImplementedError, match="tma_load"):
        Emulated(lower(kernel("add"), SIMT), replaced(r"(z\[|\*\(uint4\*\)\(z)", r"tl::tma_load(); \1"))
