"""The first pre out of a token table: the draft's embeddings are then never looked up at all.

The patched forward asks for the embeddings of its token ids. In table mode it gets a stand-in: a tensor of their shape
on the meta device, which no kernel can read, with the ids as an attribute. Only the first layer's pre sees it (`source`
has checked that), takes the ids off it and gathers. The ids travel with the tensor: no forward can see another's, and a
captured CUDA graph reads them where vLLM keeps them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import mhc
from mhc.checks import ID_DTYPES
from mhc.config import MHCConfig
from mhc.vllm_plugin import selfcheck
from mhc.vllm_plugin.selfcheck import TOKENS, Pre, Rejected
from mhc.vllm_plugin.source import EMBEDDING

IDS = "mhc_token_ids"  # on a stand-in
# vLLM's classes, by name: this package imports nothing of vLLM, and a subclass may do more
EMBEDDING_CLASS, UNQUANTISED = "VocabParallelEmbedding", "UnquantizedEmbeddingMethod"


def token_ids(x: Tensor) -> Tensor | None:
    """The ids of a stand-in; None for embeddings."""
    return getattr(x, IDS, None)


class LookUp:
    """The token table of one draft, made when a forward first shows which embedding is in use.

    vLLM lets the draft share the target's embedding after the draft was loaded: no load hook could make the table.

    Args:
        draft: vLLM's DSpark model.
        config: its first layer's.
        folded: the derived weight, [M, H].

    Attributes:
        table: None before the first forward and where the embedding or the self-check refused it.
    """

    def __init__(self, draft: nn.Module, config: MHCConfig, folded: Tensor) -> None:
        self.draft = draft
        self.config = config
        self.folded = folded
        self.table: mhc.TokenTable | None = None
        self._module: Any = None  # and its weight, as `decide` saw them
        self._weight: Tensor | None = None
        self._storage: mhc.TokenTable | None = None  # outlives a refusal: captured graphs may hold its addresses

    @property
    def embedding(self) -> Any:
        """vLLM's embedding module, which may be the target's."""
        return getattr(self.draft, EMBEDDING)

    def is_decided(self) -> bool:
        """Whether `decide` has seen the embedding that is in use now."""
        module = self.embedding
        return module is self._module and getattr(module, "weight", None) is self._weight

    def decide(self) -> str:
        """Look at the embedding in use, make the table and check it; what came of it, for the log."""
        self._module, self._weight = self.embedding, getattr(self.embedding, "weight", None)
        self.table = None
        accepted, said = selfcheck.verdict("table", self._checked)
        if accepted:
            self.table = self._storage
        return said

    def refresh(self) -> None:
        """Compute the table again, in place.

        An embedding in the middle of a reload, on the meta device, waits for its end; another one for the next forward.
        """
        if self.table is not None and self.embedding is self._module and self._obstacle() is None:
            self._weight = self.embedding.weight  # a reload may have bound a new parameter
            self._make()

    def refresh_if_stale(self) -> None:
        """Notice what changed behind the hooks."""
        if self.table is not None and self.table.is_stale(*self._sources()):
            self.refresh()

    def stand_in(self, ids: Tensor) -> Tensor:
        """[T, H] in place of the embeddings of `ids` [T]."""
        x = torch.empty(ids.shape[0], self.config.hidden_size, dtype=torch.bfloat16, device="meta")
        setattr(x, IDS, ids)
        return x

    def pre(self, ids: Tensor, norm_weight: Tensor) -> Pre:
        """The first pre of the tokens, with the outputs of vLLM's op."""
        assert self._storage is not None
        out = mhc.pre_from_table(ids, self.embedding.weight, self._storage, norm_weight, self.config)
        assert out.comb is not None
        return out.residual, out.post, out.comb, out.layer_input

    @property
    def _layer(self) -> Any:
        return self.draft.layers[0]  # type: ignore[index]

    def _obstacle(self) -> str | None:
        return obstacle(self.draft, self.config.hidden_size, self.folded.device)

    def _checked(self) -> float:
        """The error of a freshly made table as a share of its bound.

        Raises:
            Rejected: it is above 1, or the embedding is unsuitable.
        """
        why = self._obstacle()
        if why is not None:
            raise Rejected(why)
        self._make()
        return selfcheck.check(self._pre, self._layer, self.config, False, "table", self._random_tokens)

    def _sources(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the table is made of: embedding, derived weight, scale, base."""
        return self.embedding.weight, self.folded, self._layer.hc_attn_scale, self._layer.hc_attn_base

    def _make(self) -> None:
        sources = self._sources()
        if self._storage is not None and self._storage.post.shape[0] == sources[0].shape[0]:
            self._storage.refresh(*sources)
        else:
            self._storage = mhc.TokenTable.build(*sources, self.config)

    def _pre(self, ids: Tensor) -> Pre:
        return self.pre(ids, self._layer.attn_norm.weight.data)

    def _random_tokens(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Ids of both dtypes that vLLM may use, and what vLLM's own look-up finds for them."""
        weight, dtype = self.embedding.weight, ID_DTYPES[TOKENS.index(tokens) % len(ID_DTYPES)]
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(weight.shape[0], (tokens,), generator=generator).to(weight.device, dtype)
        return ids, self.draft.embed_input_ids(ids)  # type: ignore[operator]


def takes(ids: Any, device: torch.device) -> bool:
    """Whether these are ids that the gather takes; others are looked up by vLLM."""
    if not isinstance(ids, Tensor) or ids.dtype not in ID_DTYPES:
        return False
    return ids.dim() == 1 and ids.is_contiguous() and ids.device == device


def obstacle(draft: Any, hidden_size: int, device: torch.device) -> str | None:
    """Why the draft's embeddings are not rows of one whole bf16 matrix; None where they are."""
    module = getattr(draft, EMBEDDING)
    if getattr(draft, "use_sequence_parallel", False):
        return "the rows are sharded (sequence parallel)"
    if type(module).__name__ != EMBEDDING_CLASS:
        return f"the embedding is a {type(module).__name__}, not vLLM's {EMBEDDING_CLASS}"
    if module.tp_size != 1:
        return f"the embedding is sharded by vocabulary over {module.tp_size} ranks"
    method = type(module.quant_method).__name__
    if method != UNQUANTISED:
        return f"the embedding is quantised ({method})"
    weight = module.weight
    if weight.dtype != torch.bfloat16 or weight.dim() != 2 or weight.shape[1] != hidden_size:
        dtype = str(weight.dtype).removeprefix("torch.")
        return f"the embedding is {dtype} {list(weight.shape)}, not bfloat16 [V, {hidden_size}]"
    if not weight.is_contiguous() or weight.device != device:
        return f"the embedding is not contiguous on {device}"
    return None
