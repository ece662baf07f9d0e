"""The first pre of one loaded DSpark draft: its derived weight, which kernels may run it, and which one does."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import Tensor, nn

import mhc
from mhc import launch
from mhc.config import MHCConfig
from mhc.vllm_plugin import selfcheck
from mhc.vllm_plugin.look_up import LookUp, takes, token_ids
from mhc.vllm_plugin.selfcheck import Pre
from mhc.vllm_plugin.source import WEIGHT, Match

logger = logging.getLogger("vllm.plugins.mhc")  # under vLLM's own logger, whose handlers then apply

STATE = "mhc_first_pre"  # on the draft model and on the derived tensor
# in the recorded sweep (H 4096) the fused kernel is ahead of vLLM's two launches at every T, by 7 to 18 % above this;
# there it has not been tried in an engine
FUSED_MOST_TOKENS = 256
CHOICES = ("auto", "vllm", "fused", "table")
WITH_TABLE = ("auto", "table")
# vLLM's kernel is compiled once for each way to split its projection, which changes with every 64 tokens
SPLIT_TOKENS = 64

_alive: weakref.WeakSet[FirstPre] = weakref.WeakSet()


class FirstPre:
    """One draft's first pre.

    Args:
        draft: vLLM's DSpark model, whose `layers[0]` it serves.
        vllm_pre: vLLM's own kernel as (layer, x) -> residual, post, comb, layer input.
        match: what this vLLM's sources allow.
        choice: one of `CHOICES`; `auto` takes the table where it can, else the faster kernel by the number of tokens.
        max_tokens: the most tokens that a draft forward can have.

    Attributes:
        kernels: the accepted kernels of embeddings; empty means that vLLM's unpatched path runs.
        look_up: the token table, for rows that come from token ids; None where none is wanted or possible.
        calls: how often Python ran each kernel (a captured CUDA graph replays without Python).
    """

    def __init__(self, draft: nn.Module, vllm_pre: Any, match: Match, choice: str, max_tokens: int) -> None:
        self.draft = draft
        self.vllm_pre = vllm_pre
        self.match = match
        self.choice = choice
        self.max_tokens = max_tokens
        self.kernels: tuple[str, ...] = ()
        self.look_up: LookUp | None = None
        self.calls = {"vllm": 0, "fused": 0, "table": 0}
        self.weight: mhc.BroadcastWeight | None = None
        self._said: dict[str, str] = {}
        self._checked_on: torch.device | None = None
        _alive.add(self)

    @property
    def layer(self) -> Any:
        """The first draft layer."""
        return self.draft.layers[0]  # type: ignore[index]

    def config(self) -> MHCConfig:
        """The layer's shapes and constants.

        Raises:
            ValueError: they are none that the kernels take.
        """
        layer = self.layer
        return MHCConfig(
            layer.hidden_size,
            layer.hc_mult,
            layer.hc_sinkhorn_iters,
            rms_eps=layer.rms_norm_eps,
            pre_eps=layer.hc_eps,
            sinkhorn_eps=layer.hc_eps,
            norm_eps=layer.attn_norm.variance_epsilon,
            post_mult=layer.hc_post_alpha,
        )

    def refresh(self) -> None:
        """Derive the weight and the table again, in place; on the first time on a device also choose the kernels.

        A layer that is on the meta device is in the middle of a reload, whose end calls this again.
        """
        fn = self.layer.hc_attn_fn
        if fn.is_meta:
            return
        if self.weight is None:
            self.weight = mhc.BroadcastWeight(fn, self.layer.hc_mult)
        else:
            self.weight.refresh(fn)
        tensor = self.weight.tensor
        setattr(tensor, STATE, self)
        setattr(self.layer, WEIGHT, tensor)
        if self._checked_on != fn.device:
            self._checked_on = fn.device
            self._choose()
        elif self.look_up is not None:
            self.look_up.refresh()

    def is_active(self) -> bool:
        """Whether the embeddings stay 2-D; a weight that changed behind the hooks is derived again first."""
        if not self.kernels:
            return False
        assert self.weight is not None
        if self.weight.is_stale() and not self._is_capturing():
            self.refresh()
        return True

    def embeddings(self, ids: Tensor) -> Tensor:
        """[T, H] the embeddings of token ids, looked up by vLLM, or a stand-in that `run` understands."""
        if self.is_active() and self.look_up is not None and takes(ids, self.look_up.folded.device):
            if not self._is_capturing():
                if self.look_up.is_decided():
                    self.look_up.refresh_if_stale()
                else:
                    self._said["table"] = self.look_up.decide()
                    self._conclude()
            if self.look_up.table is not None and self.look_up.is_decided():
                return self.look_up.stand_in(ids)
        return self.draft.embed_input_ids(ids)  # type: ignore[operator]

    def kernel(self, x: Tensor) -> str:
        """Which of the accepted kernels runs these rows."""
        if token_ids(x) is not None:
            return "table"
        tokens = x.shape[0]
        if not tokens:
            return "fused"  # vLLM's launcher refuses an empty call
        if len(self.kernels) == 1:
            return self.kernels[0]
        return "fused" if tokens <= FUSED_MOST_TOKENS else "vllm"

    def run(self, kernel: str, x: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor) -> Pre:
        """One of our kernels, `fused` or `table`, with the outputs of vLLM's."""
        if kernel == "fused":
            return self.fused(x, scale, base, norm_weight)
        ids = token_ids(x)
        assert ids is not None
        assert self.look_up is not None
        return self.look_up.pre(ids, norm_weight)

    def fused(self, x: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor) -> Pre:
        """Our kernel, with the outputs of vLLM's: residual [T, hc, H], post, comb, layer input [T, H]."""
        assert self.weight is not None
        out = mhc.pre_broadcast(x, self.weight.tensor, scale, base, norm_weight, self._config)
        assert isinstance(out, mhc.PreOutput)
        assert out.comb is not None
        return out.residual, out.post, out.comb, out.layer_input

    def _choose(self) -> None:
        """Check the kernels; about the table the first forward decides, when the draft has its final embedding."""
        self.kernels, self._said, self.look_up = (), {}, None
        self._try("vllm" if self.match.delayed or self.choice == "vllm" else "fused")
        if self.choice in WITH_TABLE:
            if self.match.no_table is None and self.kernels:  # the fused kernel makes a table's rows
                assert self.weight is not None
                self.look_up = LookUp(self.draft, self._config, self.weight.tensor)
                return
            if self.match.no_table is not None and (self.choice == "table" or not self.match.delayed):
                self._said["table"] = f"table refused: {self.match.no_table}"
        self._conclude()

    def _conclude(self) -> None:
        """Without a table `auto` takes vLLM's kernel for many tokens; then one line says all."""
        table = None if self.look_up is None else self.look_up.table
        if self.choice == "auto" and table is None and not self.match.delayed and "vllm" not in self.kernels:
            self._try("vllm")
        if len(self.kernels) == 2:
            mode = f"auto (fused up to {FUSED_MOST_TOKENS} tokens, vllm above)"
        else:
            mode = self.kernels[0] if self.kernels else "off, vLLM's unpatched path"
        assert self.weight is not None
        size = f"derived weight {self.weight.tensor.nbytes} bytes"
        if table is not None:
            mode = f"table (rows without a token id: {mode})"
            size += f", token table {table.nbytes} bytes"
        logger.info("mhc: DSpark's first pre: mode %s; %s; %s", mode, "; ".join(self._said.values()), size)

    def _try(self, name: str) -> None:
        """Warm a kernel up, check it, and take it if it passes."""

        def attempt() -> float:
            self._config = self.config()
            self._warm_up(name)
            return selfcheck.check(self._candidate(name), self.layer, self._config, self.match.delayed, name)

        accepted, self._said[name] = selfcheck.verdict(name, attempt)
        if accepted:
            self.kernels = (*self.kernels, name)

    def _is_capturing(self) -> bool:
        assert self.weight is not None
        return self.weight.tensor.is_cuda and torch.cuda.is_current_stream_capturing()

    def _candidate(self, name: str) -> Any:
        layer = self.layer
        if name == "vllm":
            return lambda x: self.vllm_pre(layer, x)
        return lambda x: self.fused(x, layer.hc_attn_scale, layer.hc_attn_base, layer.attn_norm.weight.data)

    def _warm_up(self, name: str) -> None:
        """Compile what this kernel can reach: the first request must find everything compiled."""
        fn = self.layer.hc_attn_fn
        if not fn.is_cuda:
            return
        if name == "fused":
            for wanted, *args in launch.reachable(self._config, self.max_tokens):
                if wanted == "fused" and args[-2:] == [True, "all"]:
                    launch.kernel(fn.get_device(), wanted, *args)
            return
        x = torch.zeros(self.max_tokens, self._config.hidden_size, dtype=torch.bfloat16, device=fn.device)
        for tokens in range(1, self.max_tokens + 1, SPLIT_TOKENS):
            self.vllm_pre(self.layer, x[:tokens])


def embeddings(draft: Any, ids: Tensor) -> Tensor:
    """What the patched forward asks first: this draft's embeddings of token ids, or a stand-in for them."""
    state = draft.__dict__.get(STATE)
    return draft.embed_input_ids(ids) if state is None else state.embeddings(ids)


def keeps_embeddings(draft: nn.Module, x: Tensor) -> bool:
    """What the patched forward asks next: whether its embeddings x stay 2-D into the first layer."""
    state = draft.__dict__.get(STATE)
    # a stand-in cannot be expanded, and was only given because the answer is yes
    return token_ids(x) is not None or (state is not None and state.is_active())


def refresh_all() -> None:
    """Derive every live draft's weight again: a reload of any model has ended."""
    for state in list(_alive):
        if state.weight is not None:  # one that was never made waits for its own load
            state.refresh()
