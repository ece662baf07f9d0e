"""A random miniature pair that answers made-up questions here and now: what needs neither training nor GSM8K.

Its acceptance says nothing about a trained draft. It shows that verification is exact, that the counters mean what
they say, and that the two arms of the first pre map are one function: in fp64, where no rounding hides a difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mhc.dspark import DSparkDraft, Target, V4Config, initialise, to_inference
from mhc.dspark import tokenizer as tokenizers
from mhc.dspark.artifacts import Pair
from mhc.gsm8k.compare import Arms
from mhc.gsm8k.data import Problem
from mhc.gsm8k.mini import Arm, encode_prompts, equality, run_arm
from mhc.gsm8k.rows import Record

VOCAB_SIZE = 260  # four special tokens and the bytes
LIVELY = 6.0  # how far matrices are scaled up: at their training start every greedy text would be much alike


@torch.no_grad()
def random_pair(seed: int = 0, dtype: torch.dtype = torch.float64) -> Pair:
    """An untrained pair of a few thousand parameters on the CPU, in inference mode, with a tokenizer of single bytes.

    Args:
        seed: of the target's weights; the draft's is the next one.
        dtype: of inference (mHC weights stay fp32).
    """
    config = V4Config.tiny("dense", VOCAB_SIZE)
    target, draft = Target(config), DSparkDraft(config)
    initialise(target, config, seed)
    initialise(draft.bind(target), config, seed + 1)
    for model in (target, draft):
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(LIVELY)
        to_inference(model, dtype)
    return Pair(target, draft, tokenizers.train([], VOCAB_SIZE))


def made_up(count: int) -> list[Problem]:
    """`count` sums as problems."""
    return [Problem(i, f"What is {i} plus {i + 1}?", f"#### {2 * i + 1}") for i in range(count)]


def answer(pair: Pair, problems: Sequence[Problem], expansions: Sequence[str], *, max_tokens: int = 32) -> Arms:
    """Every problem in every arm, greedily and at temperature 1, and each greedy text against plain decoding's.

    Args:
        pair: with a draft, in inference mode.
        problems: at least two, for the intervals.
        expansions: arms of the draft's first layer, see `mhc.dspark.expansion`.
        max_tokens: of an answer.

    Returns:
        `question`, `arm` and `equality` records, as in a recorded run.

    Raises:
        ValueError: the pair has no draft, or as `mhc.dspark.generate`.
    """
    if pair.draft is None:
        raise ValueError("pair must have a draft, got none")
    prompts, k = encode_prompts(pair, problems), pair.draft.config.block_size
    plain = run_arm(pair, problems, prompts, Arm(None, 0, 0.0, width=k + 1), max_tokens=max_tokens)
    records: list[Record] = []
    for expansion in expansions:
        for temperature in (0.0, 1.0):
            arm = Arm(expansion, k, temperature)
            outcome = run_arm(pair, problems, prompts, arm, max_tokens=max_tokens)
            records += [*(row.record() for row in outcome.rows), outcome.total]
            if temperature == 0:
                records.append(equality(arm, outcome, plain))
    return Arms(records, k)
