"""Semi-autoregressive drafting: one backbone forward, then the Markov head token by token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhc.dspark.draft import DraftOutput, DSparkDraft
from mhc.dspark.sampling import distribution, pick


class Proposal(NamedTuple):
    """A drafted block."""

    tokens: Tensor  # [R, k] int64
    probabilities: Tensor | None  # [R, k, V] fp32: what each token was drawn from, corrected; None at temperature 0
    confidence: Tensor  # [R, k] fp32: predicted acceptance of each token


def propose(draft: DSparkDraft, output: DraftOutput, anchors: Tensor, temperature: float, uniform: Tensor) -> Proposal:
    """Sample the block left to right: token i from `softmax((U_i + W2 W1[x_{i-1}]) / temperature)`.

    Args:
        draft: for its heads.
        output: the backbone's, base logits [R, k, V].
        anchors: [R] int64, x_0.
        temperature: the target's; 0 takes the argmax.
        uniform: fp64 [R, k], of the drafting stream.
    """
    tokens, probabilities, confidence = [], [], []
    previous = anchors
    for row in range(output.logits.shape[1]):
        embedded = draft.markov_head.embed(previous)
        corrected = output.logits[:, row] + draft.markov_head(embedded)
        if temperature == 0:
            previous = corrected.argmax(-1)
        else:
            probabilities.append(distribution(corrected, temperature))
            previous = pick(probabilities[-1], uniform[:, row])
        tokens.append(previous)
        confidence.append(draft.confidence_head(output.hidden[:, row], embedded).sigmoid())
    drawn_from = torch.stack(probabilities, 1) if probabilities else None
    return Proposal(torch.stack(tokens, 1), drawn_from, torch.stack(confidence, 1))


def truncate(confidence: Tensor, threshold: float) -> Tensor:
    """How many tokens go to the verifier: those before the first confidence below the threshold. [R, k] -> [R].

    The cut at token i looks at `c_i`, a function of the tokens *before* i: it must not depend on the token it drops, or
    the output distribution would change. Hence also: before verification, never after.
    """
    return (confidence >= threshold).long().cumprod(-1).sum(-1)
