"""How the draft's first layer gets its streams: one function an arm, all with the same result up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mhc import reference
from mhc.dspark import hyper
from mhc.ops import PreOutput

if TYPE_CHECKING:
    from mhc.dspark.draft import DSparkDraft

Expansion = Callable[["DSparkDraft", Tensor, Tensor], PreOutput]


def repeat(draft: DSparkDraft, token_ids: Tensor, x: Tensor) -> PreOutput:
    """The baseline: write every embedding `hc` times, then run the general pre map."""
    streams = reference.expand(x, draft.config.mhc.hc_mult)
    return hyper.pre(streams, draft.layers[0].attn_site, draft.config.mhc)


def broadcast(draft: DSparkDraft, token_ids: Tensor, x: Tensor) -> PreOutput:
    """Fold the projection instead of repeating its input (notebook 01, claims 1 to 4)."""
    # under autograd the fold is part of the graph, so that the projection is trained
    folded = None if torch.is_grad_enabled() else draft.fn_broadcast
    return hyper.pre_broadcast(x, folded, draft.layers[0].attn_site, draft.config.mhc)


EXPANSIONS: dict[str, Expansion] = {"broadcast": broadcast, "repeat": repeat}


def expand(draft: DSparkDraft, token_ids: Tensor, x: Tensor, expansion: str) -> PreOutput:
    """The first attention pre of a block.

    Args:
        draft: the model, for its first layer's weights.
        token_ids: [T] int64, of which `x` [T, H] are the embeddings.
        expansion: a key of `EXPANSIONS`.

    Raises:
        ValueError: `expansion` is unknown.
    """
    if expansion not in EXPANSIONS:
        raise ValueError(f"expansion must be one of {', '.join(EXPANSIONS)}, got {expansion!r}")
    return EXPANSIONS[expansion](draft, token_ids, x)
