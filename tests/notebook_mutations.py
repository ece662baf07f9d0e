"""Faults put into the package before a notebook runs: each must make it fail.

A mutation is code that runs in the notebook's kernel before its first cell, in the same process, on the same modules.
It patches *every* name that a notebook may use (`mhc.fold` and `mhc.weights.fold` are two names of one function).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`source` breaks the package for the notebook whose name starts with `notebook` ("01")."""

    notebook: str
    name: str
    source: str


WRONG_FOLD = """
import mhc, mhc.reference, mhc.weights

def wrong(fn, hc_mult):  # drops the last stream
    rows, width = fn.shape
    return fn.view(rows, hc_mult, width // hc_mult)[:, :-1].sum(1)

mhc.fold = mhc.weights.fold = mhc.reference.fold = wrong
"""

WRONG_FLOOR = """
from mhc.bench import work

right = work.floor_bytes
work.floor_bytes = lambda *arguments: tuple(2 * count for count in right(*arguments))
"""

PLAIN_FOLD = """
import torch, mhc, mhc.arms, mhc.weights

def plain(fn, hc_mult):  # a sum in fp64 loses small terms between large ones
    return fn.double().unflatten(1, (hc_mult, -1)).sum(1).float()

mhc.fold = mhc.weights.fold = mhc.arms.fold = plain
"""

FP32_FOLD = """
import mhc, mhc.arms, mhc.reference, mhc.weights

mhc.fold = mhc.weights.fold = mhc.arms.fold = mhc.reference.fold
"""

SINKHORN_ENDS_ON_ROWS = """
import mhc.reference

right = mhc.reference.sinkhorn
mhc.reference.sinkhorn = lambda logits, iters, eps: right(logits.transpose(-1, -2), iters, eps).transpose(-1, -2)
"""

NORM_FORGETS_EPS_OF_P = """
import torch, mhc.reference

def wrong(x, pre_sum, weight, eps):  # RMSNorm(x) instead of RMSNorm(P * x)
    return mhc.reference.rms_norm(x, weight, eps)

mhc.reference.analytic_norm = wrong
"""

COLLAPSE_AVERAGES = """
import mhc.reference

def wrong(x, fn_broadcast, scale, base, norm_weight, config):  # the norm would hide it
    pre, post, comb = mhc.reference.gates(mhc.reference.mixes(x, fn_broadcast, config.rms_eps), scale, base, config)
    y = pre.mean(-1, keepdim=True) * x.to(pre.dtype)
    if norm_weight is not None:
        y = mhc.reference.rms_norm(mhc.reference.round_bf16(y), norm_weight, config.norm_eps)
    return pre, post, comb, y

mhc.reference.pre_broadcast = wrong
"""

NORM_ROUNDS_Y = """
import mhc.reference

def wrong(x, pre_sum, weight, eps):
    y = mhc.reference.round_bf16(pre_sum.unsqueeze(-1) * x)
    return mhc.reference.rms_norm(y, weight, eps)

mhc.reference.analytic_norm = wrong
"""

BOUND_WITHOUT_SUMMATION = """
import mhc.error

mhc.error.gamma = lambda count, unit=0.0: 0.0
"""

TF32_ROUNDS_TO_NEAREST = """
import mhc.arithmetic

mhc.arithmetic.truncate_tf32 = mhc.arithmetic.nearest_tf32
"""

INNER_PRODUCT_COUNTED_ONCE = """
import mhc.cancellation

right = mhc.cancellation.inner_products

def wrong(r):  # of the first two streams, in one order only
    products = right(r)
    products[:, 0, 1] /= 2
    return products

mhc.cancellation.inner_products = wrong
"""

OP_OFF_BY_A_MILLIONTH = """
import mhc, mhc.ops

right = mhc.ops.pre_broadcast

def wrong(*arguments, **options):
    out = right(*arguments, **options)
    return out._replace(post=out.post * (1 + 2e-6))

mhc.pre_broadcast = mhc.ops.pre_broadcast = wrong
"""

EVERY_DRAFT_IS_ACCEPTED = """
from mhc.dspark import rounds

right = rounds.verify

def wrong(logits, proposal, length, *rest):
    verdict = right(logits, proposal, length, *rest)
    return verdict._replace(tokens=proposal.tokens[:, [*range(proposal.tokens.shape[1]), -1]], accepted=length)

rounds.verify = wrong
"""

FINISHED_REQUESTS_COUNT_ROUNDS = """
import torch
from mhc.dspark.batch import Batch

right = Batch.record
Batch.record = lambda self, was_live, *rest: right(self, torch.ones_like(was_live), *rest)
"""

STEPS_OF_EVERY_REQUEST = """
from mhc.bench import published, serving_bound

right = serving_bound.most_steps
serving_bound.most_steps = lambda tokens: published.SERVING_PROMPTS * right(tokens)  # a batch is served at once
"""

INTERVAL_OF_ONE_SAMPLE = """
from mhc.bench import serving_stats

def wrong(differences, seed=0):
    low, high = differences.mean() - 1.96 * differences.std(), differences.mean() + 1.96 * differences.std()
    return float(differences.mean()), float(low), float(high)

serving_stats.mean_interval = wrong
"""

PATCH_IS_NEVER_ACTIVE = """
from mhc.bench import serving_source

right = serving_source.run_forward
serving_source.run_forward = lambda source, patched, *rest: right(source, False, *rest)
"""

MUTATIONS: list[Mutation] = [
    Mutation("01", "fold-drops-a-stream", WRONG_FOLD),
    Mutation("01", "fold-plain-fp64", PLAIN_FOLD),
    Mutation("01", "collapse-averages", COLLAPSE_AVERAGES),
    Mutation("01", "norm-forgets-eps-of-p", NORM_FORGETS_EPS_OF_P),
    Mutation("01", "sinkhorn-ends-on-rows", SINKHORN_ENDS_ON_ROWS),
    Mutation("02", "bound-without-summation", BOUND_WITHOUT_SUMMATION),
    Mutation("02", "fold-in-fp32", FP32_FOLD),
    Mutation("02", "tf32-rounds-to-nearest", TF32_ROUNDS_TO_NEAREST),
    Mutation("02", "norm-rounds-y", NORM_ROUNDS_Y),
    Mutation("02", "inner-product-counted-once", INNER_PRODUCT_COUNTED_ONCE),
    Mutation("02", "op-off-by-a-millionth", OP_OFF_BY_A_MILLIONTH),
    Mutation("03", "floor-counts-bytes-twice", WRONG_FLOOR),
    Mutation("04", "fold-drops-a-stream", WRONG_FOLD),
    Mutation("04", "every-draft-is-accepted", EVERY_DRAFT_IS_ACCEPTED),
    Mutation("04", "finished-requests-count-rounds", FINISHED_REQUESTS_COUNT_ROUNDS),
    Mutation("05", "fold-drops-a-stream", WRONG_FOLD),
    Mutation("05", "patch-is-never-active", PATCH_IS_NEVER_ACTIVE),
    Mutation("05", "steps-of-every-request", STEPS_OF_EVERY_REQUEST),
    Mutation("05", "interval-of-one-sample", INTERVAL_OF_ONE_SAMPLE),
]
