"""Changing vLLM's modules in memory: everything is prepared first, then set at once, or nothing is.

What changes in a process that imports a DSpark module (and in no other):

- the draft model's forward, see `source` and, for the token table, `look_up`;
- the draft's constructor, which attaches a `FirstPre`, its `load_weights` and `process_weights_after_loading`, which
  derive its weight;
- the end of every load (the loader of vLLM 0.26.0 calls no model's `process_weights_after_loading`) and of every
  layerwise reload;
- the layer's broadcast op, which runs our kernels for tensors that a `FirstPre` derived and vLLM's for all others;
- for the token table, the target's `load_weights`: a refit of its embedding, which the draft shares, reaches the table;
- with `MHC_POST_PRE=ours`, the op of all other layers of V4, target and draft, see `post_pre`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from mhc.vllm_plugin.first_pre import STATE, WITH_TABLE, FirstPre, embeddings, keeps_embeddings, refresh_all
from mhc.vllm_plugin.post_pre import PostPre
from mhc.vllm_plugin.source import (
    BROADCAST_OP,
    DELAYED_OP,
    DRAFT_CLASS,
    EMBEDDING,
    GUARD,
    LAYER_CLASS,
    LOOK_UP,
    TARGET_CLASS,
    WEIGHT,
    Match,
    Mismatch,
    calls_model_hook,
    examine,
    transformed,
)

CAUSAL_CLASS = "DSparkDeepseekV4ForCausalLM"
POST_PRE_OP = "mhc_fused_post_pre_tilelang"
LOADER = "vllm.model_executor.model_loader"
ABSENT = object()


class Changes:
    """Attributes to set on modules and classes, all or none, and to restore."""

    def __init__(self) -> None:
        self._wanted: list[tuple[Any, str, Any]] = []
        self._replaced: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Remember a change."""
        self._wanted.append((owner, name, value))

    def apply(self) -> None:
        """Make every change; on an exception undo those made and raise it."""
        try:
            for owner, name, value in self._wanted:
                before = vars(owner).get(name, ABSENT)
                setattr(owner, name, value)
                self._replaced.append((owner, name, before))
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore what was there before."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def patch(module: ModuleType, choice: str, post_pre: str) -> tuple[Match, Changes]:
    """Patch an imported DSpark module.

    Args:
        module: vLLM's `models.deepseek_v4.nvidia.dspark` or its V4.1 twin.
        choice: `MHC_FIRST_PRE`.
        post_pre: `MHC_POST_PRE`.

    Returns:
        What was matched, and the changes, for `undo`.

    Raises:
        Mismatch: this vLLM is not what the plugin knows; nothing was changed.
    """
    draft_class, causal_class, layer_class = (
        _attribute(module, name) for name in (DRAFT_CLASS, CAUSAL_CLASS, LAYER_CLASS)
    )
    layer_module = inspect.getmodule(layer_class)
    if layer_module is None:
        raise Mismatch(f"{LAYER_CLASS} is in no module")
    source = inspect.getsource(module)
    match = examine(source, inspect.getsource(layer_module))
    with_table = choice in WITH_TABLE and match.no_table is None
    changes = Changes()

    names: dict[str, Any] = {}
    exec(transformed(source, inspect.getfile(module), with_table), vars(module), names)
    forward = names["forward"]
    forward.__qualname__ = f"{DRAFT_CLASS}.forward"
    changes.set(module, GUARD, keeps_embeddings)
    changes.set(draft_class, "forward", forward)
    if with_table:
        changes.set(module, LOOK_UP, embeddings)
        target = _attribute(layer_module, TARGET_CLASS)
        changes.set(target, "load_weights", _then_refresh_tables(target.load_weights))

    op = _attribute(layer_module, DELAYED_OP if match.delayed else BROADCAST_OP)
    changes.set(causal_class, "__init__", _constructor(causal_class.__init__, op, match, choice))
    for name in ("load_weights", "process_weights_after_loading"):
        original = getattr(causal_class, name, None)
        if original is None and name == "load_weights":
            raise Mismatch(f"{CAUSAL_CLASS} has no load_weights")
        changes.set(causal_class, name, _then_refresh(original, name))
    if not match.delayed:
        changes.set(layer_module, BROADCAST_OP, _dispatcher(op))
        if post_pre == "ours":
            changes.set(layer_module, POST_PRE_OP, PostPre(_attribute(layer_module, POST_PRE_OP)))
    _loader_changes(changes)
    changes.apply()
    return match, changes


def _attribute(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        raise Mismatch(f"{module.__name__} has no {name}")
    return getattr(module, name)


def _constructor(original: Callable[..., None], op: Callable[..., Any], match: Match, choice: str) -> Any:
    def vllm_pre(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        arguments = (layer.hc_attn_scale, layer.hc_attn_base, layer.rms_norm_eps, layer.hc_eps, layer.hc_eps,
                     layer.hc_post_alpha, layer.hc_sinkhorn_iters)  # fmt: skip
        norm = {"norm_weight": layer.attn_norm.weight.data, "norm_eps": layer.attn_norm.variance_epsilon}
        weight = getattr(layer, WEIGHT)
        if not match.delayed:
            return op(x, layer.hc_attn_fn, *arguments, **norm, fn_broadcast=weight)
        residual = x.unsqueeze(1).expand(-1, layer.hc_mult, -1).contiguous()
        post, comb, layer_input, _ = op(residual, weight, *arguments, x=x, **norm)
        return residual, post, comb, layer_input

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        original(self, *args, vllm_config=vllm_config, **kwargs)
        draft: Any = self.model
        state = FirstPre(draft, vllm_pre, match, choice, _max_tokens(vllm_config))
        draft.__dict__[STATE] = state  # past nn.Module: neither a parameter nor a buffer nor in a checkpoint

    return init


def _max_tokens(vllm_config: Any) -> int:
    scheduler = vllm_config.scheduler_config
    block = vllm_config.speculative_config.num_speculative_tokens
    return max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * block)


def _refresh(model: nn.Module) -> None:
    model.model.__dict__[STATE].refresh()


def _then_refresh(original: Callable[..., Any] | None, name: str) -> Any:
    def hook(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = None if original is None else original(self, *args, **kwargs)
        _refresh(self)
        return result

    hook.__name__ = name
    return hook if original is None else functools.wraps(original)(hook)


def _then_refresh_tables(original: Callable[..., Any]) -> Any:
    """A refit may hand over one tensor a call: only those of the embedding, among thousands, concern a table."""

    @functools.wraps(original)
    def load_weights(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        loaded = original(self, *args, **kwargs)
        if loaded is None or any(EMBEDDING in name for name in loaded):
            refresh_all()
        return loaded

    return load_weights


def _dispatcher(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def dispatch(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *constants: Any, **named: Any) -> Any:
        state: FirstPre | None = getattr(named.get("fn_broadcast"), STATE, None)
        if state is None:
            return original(x, fn, scale, base, *constants, **named)
        kernel = state.kernel(x)
        state.calls[kernel] += 1
        if kernel == "vllm":
            return original(x, fn, scale, base, *constants, **named)
        return state.run(kernel, x, scale, base, named["norm_weight"])

    return dispatch


def _loader_changes(changes: Changes) -> None:
    """The two places of vLLM's loader that matter: the end of a load, and the end of a layerwise reload."""
    names = ("utils", "base_loader", "reload", "reload.layerwise")
    modules = {name: importlib.import_module(f"{LOADER}.{name}") for name in names}
    load = _attribute(modules["utils"], "process_weights_after_loading")
    if not hasattr(load, STATE):
        hooked = calls_model_hook(inspect.getsource(modules["utils"]))

        @functools.wraps(load)
        def load_then_refresh(model: nn.Module, *args: Any, **kwargs: Any) -> None:
            load(model, *args, **kwargs)
            if STATE not in getattr(getattr(model, "model", None), "__dict__", {}):
                refresh_all()  # the target's embedding may be the draft's
            elif not hooked:
                model.process_weights_after_loading()  # type: ignore[operator]

        setattr(load_then_refresh, STATE, True)
        _everywhere(changes, modules, "process_weights_after_loading", load, load_then_refresh)
    finalize = _attribute(modules["reload.layerwise"], "finalize_layerwise_processing")
    if not hasattr(finalize, STATE):

        @functools.wraps(finalize)
        def finalize_then_refresh(*args: Any, **kwargs: Any) -> None:
            finalize(*args, **kwargs)
            refresh_all()

        setattr(finalize_then_refresh, STATE, True)
        _everywhere(changes, modules, "finalize_layerwise_processing", finalize, finalize_then_refresh)


def _everywhere(changes: Changes, modules: dict[str, ModuleType], name: str, old: Any, new: Any) -> None:
    for module in modules.values():
        if vars(module).get(name) is old:
            changes.set(module, name, new)
