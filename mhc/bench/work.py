"""Bytes and operations of an op as each implementation performs it, counted from shapes.

Bytes count every input read once and every output written once, plus what an implementation itself writes and reads
again, between its launches or within one; scratch below a hundredth of that is left out. `floor_bytes` counts inputs
and outputs of the op alone, by its least traffic: the first pre as a table lookup.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mhc.launch import fits_quad

BF16, FP32, INT64 = 2, 4, 8
OPS = ("first_pre", "post_pre", "first_pre_then_post_pre")
FIRST_IMPLS = (
    "vllm_repeat",
    "vllm_broadcast",
    "torch_compile",
    "mhc_repeat",
    "mhc_two_launch",
    "mhc_fused",
    "mhc_table",
    "mhc_noise_rows",
    "mhc_collapsed",
    "tilekernels_repeat",
    "floor_copy",
    "floor_launch",
)
POST_PRE_IMPLS = ("vllm_post_pre", "torch_compile", "mhc_post_pre", "floor_copy")
# the pair is named after its first half; its second is of the same family
PAIR_IMPLS = ("vllm_repeat", "vllm_broadcast", "mhc_fused", "mhc_table", "mhc_collapsed", "floor_copy")
IMPLS = {"first_pre": FIRST_IMPLS, "post_pre": POST_PRE_IMPLS, "first_pre_then_post_pre": PAIR_IMPLS}
BLOCK_TOKENS = 7  # k rows of a DSpark block: an anchor, then the noise token k - 1 times


@dataclass(frozen=True)
class Work:
    """What one call does.

    Args:
        read, written: bytes.
        flops: floating-point operations.
        launches: kernels launched.
        barriers: barriers that all blocks of a cluster or grid wait at, one after the other.
        sinkhorns: Sinkhorn iterations done one after the other by a row.
        projected: token-rows times columns of the projection, `T * K`.
    """

    read: int
    written: int
    flops: int
    launches: int
    barriers: int = 0
    sinkhorns: int = 0
    projected: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def work(op: str, impl: str, tokens: int, hidden: int, hc: int = 4, iters: int = 20) -> Work:
    """Count one call.

    Args:
        op: one of `OPS`.
        impl: one of `IMPLS[op]`.
        tokens, hidden, hc, iters: T, H, hc and Sinkhorn iterations.

    Raises:
        ValueError: an unknown op, or an impl that the op does not have.
    """
    if op not in IMPLS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if impl not in IMPLS[op]:
        raise ValueError(f"impl of {op} must be one of {', '.join(IMPLS[op])}, got {impl!r}")
    if op == "first_pre":
        return _first_pre(impl, tokens, hidden, hc, iters)
    if op == "post_pre":
        return _post_pre(impl, tokens, hidden, hc, iters)
    second = {"floor_copy": "floor_copy", "vllm_repeat": "vllm_post_pre", "vllm_broadcast": "vllm_post_pre"}
    last = _post_pre(second.get(impl, "mhc_post_pre"), tokens, hidden, hc, iters)
    if impl in ("mhc_collapsed", "floor_copy"):  # the second half reads x [T, H] instead of [T, hc, H], and no comb
        saved = (hc - 1) * BF16 * tokens * hidden + FP32 * tokens * hc * hc
        return _first_pre("mhc_collapsed", tokens, hidden, hc, iters) + replace(last, read=last.read - saved)
    return _first_pre(impl, tokens, hidden, hc, iters) + last


def floor_bytes(op: str, tokens: int, hidden: int, hc: int = 4) -> tuple[int, int]:
    """Bytes (read, written) that any implementation of the op must move."""
    least = work(op, "floor_copy", tokens, hidden, hc)
    return least.read, least.written


def _first_pre(impl: str, t: int, h: int, hc: int, iters: int) -> Work:
    rows, x = hc * (hc + 2), BF16 * t * h
    mixes = FP32 * t * (hc + hc * hc)
    fn, fn_b, norm = FP32 * rows * hc * h, FP32 * rows * h, BF16 * h
    looked_up = INT64 * t + FP32 * t * (1 + hc + hc * hc)
    gates = t * (8 * rows + 4 * hc * hc * iters)
    if impl == "floor_launch":
        return Work(0, 0, 0, 1)
    if impl in ("mhc_table", "floor_copy"):
        return Work(x + looked_up + norm, hc * x + x + mixes, 2 * t * h, 1)
    if impl == "mhc_collapsed":
        return Work(x + INT64 * t + FP32 * t * (1 + hc) + norm, x + FP32 * t * hc, 2 * t * h, 1)
    if impl in ("vllm_repeat", "mhc_repeat", "tilekernels_repeat"):
        # x is read, the streams are written, read by the projection and, in a second launch, by the collapse
        launches, again = {"mhc_repeat": (2, 0)}.get(impl, (3, hc * x))
        flops = 2 * t * hc * h * (rows + 1) + 2 * t * hc * h + 4 * t * h + gates
        return Work(
            x + hc * x + again + fn + norm,
            hc * x + x + mixes,
            flops,
            launches,
            barriers=2 if impl == "mhc_repeat" else 0,
            sinkhorns=iters,
            projected=t * hc * h,
        )
    if impl == "mhc_noise_rows":
        # anchors and one noise row are put together, become a table of their own, and are looked up by made-up ids
        rows_made = t // BLOCK_TOKENS + 1
        own, entries = BF16 * rows_made * h, FP32 * rows_made * (2 + hc + hc * hc)
        return Work(
            2 * own + fn_b + x + looked_up + norm,
            own + entries + INT64 * t + hc * x + x + mixes,
            2 * rows_made * h * (rows + 1) + 2 * t * h + rows_made * (8 * rows + 4 * hc * hc * iters),
            6,
            barriers=2,
            sinkhorns=iters,
            projected=rows_made * h,
        )
    two = impl in ("vllm_broadcast", "mhc_two_launch", "torch_compile")
    flops = 2 * t * h * (rows + 1) + 5 * t * h + gates
    return Work(
        x + (x if two else 0) + fn_b + norm,
        hc * x + x + mixes,
        flops,
        2 if two else 1,
        barriers=0 if two else 2,
        sinkhorns=iters,
        projected=t * h,
    )


def _post_pre(impl: str, t: int, h: int, hc: int, iters: int) -> Work:
    rows, x = hc * (hc + 2), BF16 * t * h
    mixes = FP32 * t * (hc + hc * hc)
    fn, norm = FP32 * rows * hc * h, BF16 * h
    gates = t * (8 * rows + 4 * hc * hc * iters)
    flops = 2 * t * hc * h * (hc + 1) + 2 * t * hc * h * (rows + 1) + 2 * t * hc * h + 4 * t * h + gates
    read, written = x + hc * x + mixes + fn + norm, hc * x + x + mixes
    if impl == "floor_copy":
        return Work(read, written, 0, 1)
    # vLLM: the new streams are written, then read by the projection (above 16 tokens) and again by the collapse
    again = 0 if impl == "mhc_post_pre" else hc * x * (1 if t <= 16 else 2)
    launches = 1 if impl == "mhc_post_pre" else 2 if t <= 16 else 3
    # ours meets its peers once, or twice where the norm needs sums of its own
    barriers = 0 if impl != "mhc_post_pre" else 1 if fits_quad(h, hc) else 2
    return Work(read + again, written, flops, launches, barriers=barriers, sinkhorns=iters, projected=t * hc * h)
