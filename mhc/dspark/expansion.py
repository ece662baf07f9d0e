"""How the draft's first layer gets its streams: one function an arm, all with the same result up to rounding.

Under autograd and for drafts that are not bf16, `hyper` runs the formulas of `repeat`, `broadcast` and `collapsed`, and
`table` is `broadcast`: a look-up has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mhc import reference
from mhc.dspark import hyper
from mhc.ops import PreOutput
from mhc.table import pre_from_table

if TYPE_CHECKING:
    from mhc.dspark.draft import DSparkDraft

Expansion = Callable[["DSparkDraft", Tensor], PreOutput]


def repeat(draft: DSparkDraft, token_ids: Tensor) -> PreOutput:
    """The baseline: write every embedding `hc` times, then run the general pre map."""
    streams = reference.expand(draft.embed(token_ids), draft.config.mhc.hc_mult)
    return hyper.pre(streams, draft.layers[0].attn_site, draft.config.mhc)


def broadcast(draft: DSparkDraft, token_ids: Tensor, *, collapse: bool = False) -> PreOutput:
    """Fold the projection instead of repeating its input (notebook 01, claims 1 to 4)."""
    # under autograd the fold is part of the graph, so that the projection is trained
    folded = None if torch.is_grad_enabled() else draft.fn_broadcast
    x = draft.embed(token_ids)
    return hyper.pre_broadcast(x, folded, draft.layers[0].attn_site, draft.config.mhc, collapse=collapse)


def collapsed(draft: DSparkDraft, token_ids: Tensor) -> PreOutput:
    """`broadcast` whose streams stay one embedding until the first post writes them (notebook 01, claim 6)."""
    return broadcast(draft, token_ids, collapse=True)


def table(draft: DSparkDraft, token_ids: Tensor) -> PreOutput:
    """Look the mixes up by token id (notebook 01, claims 7 and 8)."""
    embedding = draft.shared.embed.weight
    if not hyper.uses_ops(embedding):
        return broadcast(draft, token_ids)
    norm_weight = draft.layers[0].attn_site.norm_weight
    return pre_from_table(token_ids, embedding, draft.token_table, norm_weight, draft.config.mhc)


EXPANSIONS: dict[str, Expansion] = {
    "broadcast": broadcast,
    "repeat": repeat,
    "table": table,
    "collapsed": collapsed,
}


def expand(draft: DSparkDraft, token_ids: Tensor, expansion: str) -> PreOutput:
    """Embedding and first attention pre of a block.

    Args:
        draft: the model, for the embedding it borrows and its first layer's weights.
        token_ids: [T] int64.
        expansion: a key of `EXPANSIONS`.

    Raises:
        ValueError: `expansion` is unknown.
    """
    if expansion not in EXPANSIONS:
        raise ValueError(f"expansion must be one of {', '.join(EXPANSIONS)}, got {expansion!r}")
    return EXPANSIONS[expansion](draft, token_ids)
