"""Exact verification: accept a prefix of the draft, then emit one token so that the output is the target's own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhc.dspark.drafting import Proposal
from mhc.dspark.sampling import distribution, pick


class Verdict(NamedTuple):
    """The outcome of a round."""

    tokens: Tensor  # [R, k + 1] int64: the accepted drafts, the emitted token, then leftovers of no meaning
    accepted: Tensor  # [R] int64, 0 to length


def verify(
    logits: Tensor, proposal: Proposal, length: Tensor, temperature: float, accept: Tensor, emit: Tensor
) -> Verdict:
    """Rejection sampling (Leviathan et al. 2023; Chen et al. 2023).

    Token i is accepted while `u_i < p_i(x_i) / q_i(x_i)`; the first failure emits from `max(p - q, 0)`, no failure
    emits the bonus from the target's next row. At temperature 0 both are the target's argmax.

    Args:
        logits: [R, k + 1, V] of the target over `[x_0, x_1 .. x_k]`: row i judges token i + 1.
        proposal: the drafted block.
        length: [R] int64, tokens of the block that are verified, 0 to k.
        temperature: of both distributions.
        accept: fp64 [R, k], stream ACCEPT.
        emit: fp64 [R, k + 1], stream TARGET, by the position of the token to emit.

    Raises:
        ValueError: the draft's temperature was 0 and the verifier's is not, or the reverse.
    """
    if (proposal.probabilities is None) != (temperature == 0):
        raise ValueError(f"temperature must be the draft's (0 or not 0 alike), got {temperature}")
    tokens, q = proposal.tokens, proposal.probabilities
    count = tokens.shape[1]
    row = torch.arange(count, device=tokens.device)
    if q is None:
        best = logits.argmax(-1)
        agree = tokens == best[:, :count]
        accepted = (agree & (row < length.unsqueeze(1))).long().cumprod(-1).sum(-1)
        emitted = best.gather(1, accepted.unsqueeze(1))
    else:
        p = distribution(logits, temperature)
        ratio = _at(p[:, :count], tokens).double() / _at(q, tokens).double()
        agree = accept < ratio
        accepted = (agree & (row < length.unsqueeze(1))).long().cumprod(-1).sum(-1)
        emitted = pick(_emission(p, q, accepted, length), emit.gather(1, accepted.unsqueeze(1)).squeeze(1))
        emitted = emitted.unsqueeze(1)
    padded = torch.cat((tokens, emitted), dim=1)
    return Verdict(padded.scatter(1, accepted.unsqueeze(1), emitted), accepted)


def _emission(p: Tensor, q: Tensor, accepted: Tensor, length: Tensor) -> Tensor:
    """Weights [R, V] of the emitted token: the residual after a rejection, the target's own row otherwise."""
    index = accepted.view(-1, 1, 1).expand(-1, 1, p.shape[-1])
    target = p.gather(1, index).squeeze(1).double()
    drafted = q.gather(1, index.clamp(max=q.shape[1] - 1)).squeeze(1).double()
    residual = (target - drafted).clamp(min=0)
    # p == q up to rounding leaves no residual: a rejection there has probability zero, and p is as good
    usable = (accepted < length).unsqueeze(1) & (residual.sum(-1, keepdim=True) > 0)
    return torch.where(usable, residual, target)


def _at(probabilities: Tensor, tokens: Tensor) -> Tensor:
    return probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
