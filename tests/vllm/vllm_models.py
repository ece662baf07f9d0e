"""A real release's DSpark draft on CPU: its classes, layers and loader, with reference maths for the kernels."""

from __future__ import annotations

import importlib
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm_stubs import Thing

import mhc
from mhc import reference
from mhc.config import MHCConfig

HIDDEN, HC, VOCAB = 128, 4, 32
LOADER = "vllm.model_executor.model_loader"
EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode"
LOADER_MODULES = ["utils", "base_loader", "dummy_loader", "reload"] + [
    f"reload.{name}" for name in ("layerwise", "meta", "sanitize", "types", "utils")
]


def real_modules(model: str) -> list[str]:
    """What is imported from the release itself."""
    models = [f"vllm.models.{model}.nvidia.{name}" for name in ("dspark", "model")]
    embedding = [EMBEDDING] + [
        f"vllm.model_executor.{name}" for name in ("custom_op", "utils", "layers.quantization.base_config")
    ]
    sharing = [f"{SPECULATOR}.{name}.utils" for name in ("dspark", "eagle")]
    return models + [f"{LOADER}.{name}" for name in LOADER_MODULES] + embedding + sharing


class Ops:
    """The kernels that the draft calls, with vLLM's signatures, on CPU; `ran` counts them."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.broken = False

    @property
    def first(self) -> dict[str, int]:
        """Only the standalone pres."""
        return {name: count for name, count in self.ran.items() if name != "post_pre" and count}

    def config(
        self, hidden: int, rms_eps: float, pre_eps: float, sink_eps: float, mult: float, iters: int, norm_eps: float
    ) -> MHCConfig:
        return MHCConfig(hidden, HC, iters, rms_eps, pre_eps, sink_eps, norm_eps, mult)

    def mhc_pre_broadcast_tilelang(
        self,
        x: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        *constants: Any,
        norm_weight: Tensor,
        norm_eps: float,
        fn_broadcast: Tensor,
    ) -> Any:
        assert x.shape[0], "an empty launch"
        self.ran["broadcast"] += 1
        out = mhc.pre_broadcast(
            x, fn_broadcast, scale, base, norm_weight, self.config(x.shape[-1], *constants, norm_eps)
        )
        return (*out[:3], out[3] + 1) if self.broken else tuple(out)

    def mhc_pre_tilelang(
        self, r: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *constants: Any, norm_weight: Tensor, norm_eps: float
    ) -> Any:
        self.ran["repeat"] += 1
        return tuple(mhc.pre(r, fn, scale, base, norm_weight, self.config(r.shape[-1], *constants, norm_eps)))[1:]

    def mhc_fused_post_pre_tilelang(
        self,
        x: Tensor,
        r: Tensor,
        post: Tensor,
        comb: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        *constants: Any,
        norm_weight: Tensor,
        norm_eps: float,
        **_: Any,
    ) -> Any:
        self.ran["post_pre"] += 1
        config = self.config(x.shape[-1], *constants, norm_eps)
        return tuple(mhc.post_pre(x, r, post, comb, fn, scale, base, norm_weight, config))

    def mhc_post_tilelang(self, x: Tensor, r: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return mhc.post(x, r, post, comb)

    def hc_head_fused_kernel_tilelang(
        self, r: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float, eps: float
    ) -> Tensor:
        return mhc.head(r, fn, scale, base, MHCConfig(r.shape[-1], HC, rms_eps=rms_eps, pre_eps=eps))

    def mhc_pre_delayed_tilelang(
        self,
        r: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        *constants: Any,
        x: Tensor | None = None,
        pre_mix: Tensor | None = None,
        norm_weight: Tensor,
        norm_eps: float,
    ) -> Any:
        self.ran["broadcast" if x is not None else "repeat"] += 1
        config = self.config(r.shape[-1], *constants, norm_eps)
        pre, post, comb = reference.gates(
            reference.mixes(r.flatten(1) if x is None else x, fn, config.rms_eps), scale, base, config
        )
        if pre_mix is None:
            pre_mix = torch.zeros_like(pre)
            pre_mix[:, 0] = 1
        y = reference.round_bf16(reference.collapse(r, pre_mix))
        layer_input = reference.rms_norm(y, norm_weight, norm_eps).bfloat16()
        return post.unsqueeze(-1), comb, layer_input + (1 if self.broken and x is not None else 0), pre

    def mhc_shifted_post_pre(
        self,
        x: Tensor,
        r: Tensor,
        post: Tensor,
        comb: Tensor,
        *args: Any,
        pre_mix: Tensor,
        norm_weight: Tensor,
        norm_eps: float,
        **_: Any,
    ) -> Any:
        streams = mhc.post(x, r, post, comb)
        ran = self.ran.copy()
        out = self.mhc_pre_delayed_tilelang(streams, *args, pre_mix=pre_mix, norm_weight=norm_weight, norm_eps=norm_eps)
        self.ran = ran
        return (streams, *out, None)

    def hc_collapse_triton(self, r: Tensor, pre: Tensor) -> Tensor:
        return reference.collapse(r, pre).bfloat16()

    def put_into(self, module: ModuleType) -> None:
        """Replace the stubs that a module imported."""
        for name in dir(self):
            if name in vars(module):
                setattr(module, name, getattr(self, name))


class Norm(nn.Module):
    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16), requires_grad=False)
        self.variance_epsilon = eps


class Mixing(nn.Module):
    """Stands in for attention and MoE: mixes hidden units, never rows."""

    hidden_argument = 0
    use_mega_moe = use_native_mega_moe = False
    n_redundant_experts = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, *args: Any) -> Tensor:
        return args[self.hidden_argument].roll(1, -1)

    def finalize_mega_moe_weights(self) -> None: ...


class Attention(Mixing):
    hidden_argument = 1


class Config(Thing):
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def prepare(module: ModuleType, ops: Ops) -> None:
    """Give the real modules what their stubs cannot compute."""
    layers = importlib.import_module(module.DeepseekV4DecoderLayer.__module__)
    for target in (module, layers):
        ops.put_into(target)
        target.RMSNorm = Norm  # type: ignore[attr-defined]
    layers._select_dsv4_attn_cls = lambda _: Attention  # type: ignore[attr-defined]
    layers.DeepseekV4MoE = Mixing  # type: ignore[attr-defined]
    layers._use_sequence_parallel = module._use_sequence_parallel = lambda _: False  # type: ignore[attr-defined]
    if hasattr(layers, "_shard_fused_wqa_wkv"):
        layers._shard_fused_wqa_wkv = lambda _: False
    embeddings = importlib.import_module(EMBEDDING)
    real = embeddings.VocabParallelEmbedding
    module.VocabParallelEmbedding = lambda *args, **named: real(*args, params_dtype=torch.bfloat16, **named)  # type: ignore[attr-defined]
    set_ranks(1)
    embeddings.tensor_model_parallel_all_reduce = lambda x: x  # type: ignore[attr-defined]
    embeddings.divide = lambda a, b: a // b  # type: ignore[attr-defined]
    mask = embeddings.get_masked_input_and_mask  # compiled by a stub of a backend
    embeddings.get_masked_input_and_mask = getattr(mask, "_torchdynamo_orig_callable", mask)  # type: ignore[attr-defined]
    module.default_weight_loader = lambda parameter, value: parameter.data.copy_(value)  # type: ignore[attr-defined]
    module.get_tensor_model_parallel_world_size = lambda: 1  # type: ignore[attr-defined]
    module.get_tensor_model_parallel_rank = lambda: 0  # type: ignore[attr-defined]
    module.get_current_vllm_config = lambda: vllm_config()  # type: ignore[attr-defined]


def set_ranks(size: int) -> None:
    """What the next embeddings are told about tensor parallelism."""
    embeddings = importlib.import_module(EMBEDDING)
    embeddings.get_tensor_model_parallel_world_size = lambda: size  # type: ignore[attr-defined]
    embeddings.get_tensor_model_parallel_rank = lambda: 0  # type: ignore[attr-defined]


def vllm_config() -> Config:
    hf = Config(
        hidden_size=HIDDEN, hc_mult=HC, hc_eps=1e-6, rms_norm_eps=1e-6, hc_sinkhorn_iters=20, num_hidden_layers=2,
        dspark_target_layer_ids=(0, 1), n_mtp_layers=3, vocab_size=VOCAB, index_topk=8, head_dim=16,
        num_attention_heads=8, n_routed_experts=2,
        dspark_markov_rank=4, draft_vocab_size=None, mlp_layer_types=[],
    )  # fmt: skip
    return Config(
        scheduler_config=Config(max_num_batched_tokens=512, max_num_seqs=100),
        speculative_config=Config(num_speculative_tokens=7, draft_model_config=Config(hf_config=hf)),
        model_config=Config(hf_config=hf),
    )


def fill(model: nn.Module, seed: int) -> None:
    """Lively weights, written in place past the version counters, as vLLM's weight loaders do."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def run(model: Any, tokens: int = 9, given: bool = False) -> torch.Tensor:
    """A draft forward on token ids, int32 as vLLM's input buffer, or with the embeddings given."""
    ids = torch.arange(tokens, dtype=torch.int32) % VOCAB
    with torch.inference_mode():
        return model(ids, ids, model.embed_input_ids(ids) if given else None)


def target_of(model: Any) -> Any:
    """The release's real target class with nothing in it but an embedding, other than the draft's."""
    layers = importlib.import_module(type(layer(model)).__module__)
    target = layers.DeepseekV4ForCausalLM.__new__(layers.DeepseekV4ForCausalLM)
    nn.Module.__init__(target)
    target.model = nn.Module()
    own = model.model.embed_tokens
    target.model.embed_tokens = type(own)(own.org_vocab_size, own.embedding_dim, params_dtype=torch.bfloat16)
    target.model.finalize_mega_moe_weights = target.model.finalize_mhc_broadcast_weights = lambda: None
    fill(target, 7)
    return target


def share(model: Any, target: Any) -> None:
    """What the release's speculator does after it has loaded the draft."""
    names = [f"{SPECULATOR}.{name}.utils" for name in ("dspark", "eagle")] + [LOADER]
    for module in map(importlib.import_module, names):
        module.get_model = lambda **_: model  # type: ignore[attr-defined]
        module.get_pp_group = lambda: Config(world_size=1)  # type: ignore[attr-defined]
    vocabulary = Config(get_vocab_size=lambda: VOCAB, hf_config=Config(draft_vocab_size=None, model_type="deepseek_v4"))
    speculative = Config(draft_model_config=vocabulary, draft_parallel_config=Config(tensor_parallel_size=1))
    importlib.import_module(names[0]).load_dspark_model(
        target, Config(speculative_config=speculative, model_config=vocabulary)
    )


def same(a: Tensor, b: Tensor) -> None:
    """Equal rows up to the roundings of bf16 layers behind a sum in another order."""
    error = (a.float() - b.float()).abs().amax(-1) / b.float().abs().amax(-1)
    assert a.shape == b.shape
    assert not error.numel() or error.max() <= 2**-6


def quantise(model: Any) -> None:
    """A method of another name, which computes the same."""
    unquantised = model.model.embed_tokens.quant_method
    model.model.embed_tokens.quant_method = type("Fp8EmbeddingMethod", (type(unquantised),), {})()


def layer(model: Any) -> Any:
    return model.model.layers[0]


def hook(model: Any) -> None:
    """The end of a load, by the release's own loader."""
    utils = importlib.import_module(f"{LOADER}.utils")
    utils.process_weights_after_loading(model, SimpleNamespace(dtype=None, quantization=None), torch.device("cpu"))
