"""The look-up without vLLM, on whatever device there is: on a GPU inside a captured CUDA graph, over a refit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhc
from mhc.config import MHCConfig
from mhc.vllm_plugin.first_pre import FirstPre
from mhc.vllm_plugin.patch import _dispatcher
from mhc.vllm_plugin.source import WEIGHT, Match

CONFIG = MHCConfig(1024)
VOCAB, TOKENS = 320, 24
ON_GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the look-up on one not run")
)


class UnquantizedEmbeddingMethod:
    """Named as vLLM's."""


class VocabParallelEmbedding(nn.Module):
    """Named as vLLM's, and as much of it as the look-up needs."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.tp_size, self.quant_method = 1, UnquantizedEmbeddingMethod()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids.long(), self.weight)


class Draft(nn.Module):
    """A first layer's weights and an embedding."""

    def __init__(self, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        rows, wide = CONFIG.mix_rows, CONFIG.hc_mult * CONFIG.hidden_size
        self.embed_tokens = VocabParallelEmbedding(random(VOCAB, CONFIG.hidden_size).bfloat16())
        self.layers: Any = [
            SimpleNamespace(
                hidden_size=CONFIG.hidden_size, hc_mult=CONFIG.hc_mult, hc_sinkhorn_iters=CONFIG.sinkhorn_iters,
                rms_norm_eps=CONFIG.rms_eps, hc_eps=CONFIG.pre_eps, hc_post_alpha=CONFIG.post_mult,
                hc_attn_fn=random(rows, wide) / 32, hc_attn_scale=random(3), hc_attn_base=random(rows),
                attn_norm=SimpleNamespace(
                    weight=random(CONFIG.hidden_size).bfloat16(), variance_epsilon=CONFIG.norm_eps
                ),
            )
        ]  # fmt: skip

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids)


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("vLLM's kernel was called")


class Served:
    """A draft's first pre, as the patched forward and the layer call it."""

    def __init__(self, device: str) -> None:
        self.draft = Draft(device)
        self.layer = self.draft.layers[0]
        self.first = FirstPre(self.draft, refuse, Match(1, "", False, None), "table", TOKENS)
        self.first.refresh()
        self.op = _dispatcher(refuse)

    def pre(self, x: Tensor) -> tuple[Tensor, ...]:
        of = (self.layer.hc_attn_fn, self.layer.hc_attn_scale, self.layer.hc_attn_base)
        return self.op(x, *of, norm_weight=self.layer.attn_norm.weight, fn_broadcast=getattr(self.layer, WEIGHT))

    def __call__(self, ids: Tensor) -> tuple[Tensor, ...]:
        return self.pre(self.first.embeddings(ids))

    def assert_right(self, got: tuple[Tensor, ...], ids: Tensor) -> None:
        """The same as from looked-up embeddings: bit for bit on a GPU, but for a step of bf16 on a CPU."""
        for a, b in zip(got, self.pre(self.draft.embed_input_ids(ids)), strict=True):
            if a.is_cuda:
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)

    def refit(self) -> None:
        """New weights everywhere, in place."""
        for tensor in (self.draft.embed_tokens.weight, self.layer.hc_attn_fn, self.layer.hc_attn_base):
            tensor.data.copy_(tensor.flip(0) * 1.25)
        self.first.refresh()


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", mhc.checks.ID_DTYPES)
@torch.inference_mode()
def test_eager(device: str, dtype: torch.dtype) -> None:
    served = Served(device)
    for tokens in (TOKENS, 1, 0):
        ids = torch.randint(VOCAB, (tokens,), device=device).to(dtype)
        served.assert_right(served(ids), ids)
    served.refit()
    served.assert_right(served(ids), ids)
    assert served.first.calls == {"vllm": 0, "fused": 4, "table": 4}


@pytest.mark.parametrize("device", [ON_GPU])
@pytest.mark.parametrize("dtype", mhc.checks.ID_DTYPES)
@torch.inference_mode()
def test_a_captured_graph_follows_new_ids_and_a_refit(device: str, dtype: torch.dtype) -> None:
    served = Served(device)
    ids = torch.randint(VOCAB, (TOKENS,), device=device).to(dtype)
    served(ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = served(ids)
    for change in (lambda: None, lambda: ids.copy_(ids.flip(0)), served.refit):
        change()
        graph.replay()
        served.assert_right(got, ids)
    assert served.first.calls["table"] == 2
