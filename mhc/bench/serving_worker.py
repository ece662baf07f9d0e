"""What the serving bench does inside each vLLM worker: switch the plugin's paths, capture and replay graphs, count.

`Extension` is mixed into vLLM's worker (`worker_extension_cls`); its methods are called on all ranks at once. All modes
live in one engine: a mode is a way to run the draft's first pre and a way to run every other post + pre, with CUDA
graphs of its own. A switch swaps what the workers dispatch to and touches no weight.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

import torch

from mhc.bench import serving_host
from mhc.vllm_plugin.first_pre import STATE
from mhc.vllm_plugin.patch import POST_PRE_OP
from mhc.vllm_plugin.post_pre import PostPre

serving_host.install()  # vLLM imports this module in a worker before it makes a model

FN = "hc_attn_fn"


class Mode(NamedTuple):
    """How a step runs.

    Attributes:
        kernels: that the first pre may take; None are those that the plugin chose, none at all is vLLM's own path.
        table: whether the plugin's token table is used; None where the plugin chose to.
        ours_post_pre: whether our kernel runs post + pre.
    """

    kernels: tuple[str, ...] | None
    table: bool | None
    ours_post_pre: bool


MODES = {
    "unpatched": Mode((), False, False),
    "vllm_kernel": Mode(("vllm",), False, False),
    "mhc": Mode(None, None, False),
    "mhc_fused": Mode(("fused",), False, False),
    "mhc_table": Mode(None, True, False),
    "mhc_post_pre": Mode(None, None, True),
}


class Extension:
    """Methods that vLLM's worker gets; `model_runner` is the worker's."""

    model_runner: Any
    mhc_first_fn: torch.Tensor

    def mhc_start(self) -> dict[str, Any]:
        """Find the plugin's state in the loaded draft and say what runs here.

        Raises:
            RuntimeError: the plugin is not active in this process.
        """
        from vllm.models.deepseek_v4.nvidia import model as layers

        speculator = self.model_runner.speculator
        state = speculator.model.model.__dict__.get(STATE)
        if state is None:
            raise RuntimeError(
                "the plugin did not patch vLLM's draft: see the lines that begin with mhc: in vLLM's log"
            )
        self.mhc_state: Any = state  # a FirstPre
        self.mhc_layers = layers
        op = getattr(layers, POST_PRE_OP)
        self.mhc_post_pre: PostPre | None = op if isinstance(op, PostPre) else None
        self.mhc_loaded, self.mhc_look_up = tuple(state.kernels), getattr(state, "look_up", None)
        self.mhc_graphs: dict[str, tuple[Any, Any]] = {}
        self.mhc_reset()
        _count_eager(self, speculator)
        self._mhc_adopt()
        return {
            "speculator": type(speculator).__name__,
            "draft": type(speculator.model).__name__,
            "first_pre_kernels": list(self.mhc_loaded),
            "token_table": self._mhc_has_table(),
            "post_pre_ours": self.mhc_post_pre is not None and any(self.mhc_post_pre.verdicts.values()),
            "derived_weight_shape": list(state.weight.tensor.shape) if state.weight else None,
            "attention": type(speculator.model.model.layers[0].attn).__name__,
            "cuda_graphs": str(self.model_runner.cudagraph_manager.cudagraph_mode),
        }

    def _mhc_adopt(self) -> None:
        """Keep the graphs that vLLM captured at start-up: those of the mode that the environment asked for."""
        runner, draft = self.model_runner, self.model_runner.speculator.query_cudagraph_manager
        if runner.cudagraph_manager.graphs and draft.graphs:
            name = "mhc" if self.mhc_available("mhc_post_pre") else "mhc_post_pre"
            _count_replays(self, draft)
            self.mhc_graphs[name] = (runner.cudagraph_manager, draft)

    def mhc_available(self, name: str) -> str:
        """An empty text where a mode can run here, else the reason why not."""
        mode = MODES[name]
        if name != "unpatched" and not self.mhc_loaded:
            return "the plugin accepted no kernel for the first pre"
        # vLLM's own kernel is there whether or not the plugin would take it
        missing = set(mode.kernels or ()) - {"vllm", *self.mhc_loaded}
        if missing:
            return f"the plugin accepted {', '.join(self.mhc_loaded)}, not {', '.join(sorted(missing))}"
        if mode.table and not self._mhc_has_table():
            return "the plugin made no token table"
        if mode.ours_post_pre and (self.mhc_post_pre is None or not any(self.mhc_post_pre.verdicts.values())):
            return "our post + pre is not active: MHC_POST_PRE=vllm, or refused by its self-check"
        return ""

    def _mhc_has_table(self) -> bool:
        return getattr(self.mhc_look_up, "table", None) is not None

    def _mhc_use(self, kernels: tuple[str, ...] | None, table: bool | None) -> None:
        self.mhc_state.kernels = self.mhc_loaded if kernels is None else kernels
        self.mhc_state.look_up = None if table is False else self.mhc_look_up

    def mhc_switch(self, name: str, graphs: bool) -> None:
        """Run in a mode from now on, with its captured graphs or eagerly."""
        mode = MODES[name]
        self._mhc_use(mode.kernels, mode.table)
        if self.mhc_post_pre is not None:
            op = self.mhc_post_pre if mode.ours_post_pre else self.mhc_post_pre.original
            setattr(self.mhc_layers, POST_PRE_OP, op)
        runner = self.model_runner
        if name in self.mhc_graphs:
            runner.cudagraph_manager, runner.speculator.query_cudagraph_manager = self.mhc_graphs[name]
        for manager in (runner.cudagraph_manager, runner.speculator.query_cudagraph_manager):
            if manager is not None:
                manager._graphs_captured = graphs and bool(manager.graphs)

    @torch.inference_mode()
    def mhc_capture(self, name: str) -> dict[str, int]:
        """Capture a mode's graphs of target and draft, unless it has them.

        Modes that run the target alike share its graphs.

        Returns:
            How often Python ran each kernel of the first pre meanwhile.
        """
        if name in self.mhc_graphs:
            return {}
        runner, speculator = self.model_runner, self.model_runner.speculator
        self.mhc_switch(name, graphs=False)
        before = dict(self.mhc_state.calls)
        old = runner.cudagraph_manager
        alike = [other for other in self.mhc_graphs if MODES[other].ours_post_pre == MODES[name].ours_post_pre]
        speculator.init_cudagraph_manager(old.cudagraph_mode)
        if alike:
            runner.cudagraph_manager = self.mhc_graphs[alike[0]][0]
            speculator.capture()
        else:
            arguments = (old.vllm_config, old.device, old.cudagraph_mode, old.decode_query_len)
            runner.cudagraph_manager = type(old)(*arguments, lora_capture_cases=old.lora_capture_cases)
            runner.capture_model()
        draft = speculator.query_cudagraph_manager
        _count_replays(self, draft)
        self.mhc_graphs[name] = (runner.cudagraph_manager, draft)
        return {kernel: calls - before.get(kernel, 0) for kernel, calls in self.mhc_state.calls.items()}

    def mhc_reset(self, timed: bool = False) -> None:
        """Count from zero; `timed` also puts events around every draft step."""
        self.mhc_counts: Counter[str] = Counter()
        self.mhc_before = dict(self.mhc_state.calls)
        self.mhc_events: list[tuple[Any, Any]] | None = [] if timed else None

    def mhc_counted(self) -> dict[str, Any]:
        """Draft steps, eager and replayed, Python calls of each first pre, and the timed steps, since `mhc_reset`."""
        torch.cuda.synchronize()
        calls = {f"first_pre_{k}": n - self.mhc_before.get(k, 0) for k, n in self.mhc_state.calls.items()}
        times = [start.elapsed_time(end) * 1e3 for start, end in self.mhc_events or []]
        return {"eager_steps": self.mhc_counts["eager"], "graph_steps": self.mhc_counts["graph"], **calls,
                "draft_us": times}  # fmt: skip

    def mhc_replay(self, part: str, tokens: int, names: list[str], rounds: int, seed: int) -> dict[str, list[float]]:
        """Replay the modes' graphs of the draft or the target in turn, on the buffers of the last real step.

        Args:
            part: `draft` or `target`.
            tokens: of the graph.
            names: modes; the same index in their lists is the same round, whose order is drawn anew.
            rounds: how many.
            seed: of the orders, the same on all ranks.

        Returns:
            us of each replay.

        Raises:
            ValueError: there is no such graph.
        """
        graphs = {name: self._mhc_graph(part, tokens, name) for name in names}
        for name in names * 4:
            graphs[name].replay()
        orders, timed = random.Random(seed), []
        for _ in range(rounds):
            order = list(names)
            orders.shuffle(order)
            for name in order:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graphs[name].replay()
                end.record()
                timed.append((name, start, end))
        torch.cuda.synchronize()
        times: dict[str, list[float]] = {name: [] for name in names}
        for name, start, end in timed:
            times[name].append(start.elapsed_time(end) * 1e3)
        return times

    def mhc_kernels(self, tokens: int, name: str) -> list[tuple[str, float]]:
        """Name and us of every kernel of one replay of a mode's draft graph, in order."""
        from torch.profiler import ProfilerActivity, profile

        graph = self._mhc_graph("draft", tokens, name)
        graph.replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            graph.replay()
            torch.cuda.synchronize()
        events = [event for event in profiled.events() if "CUDA" in str(event.device_type)]
        events.sort(key=lambda event: event.time_range.start)
        return [(event.name, event.time_range.elapsed_us()) for event in events]

    def mhc_draft_tokens(self, tokens: int, names: list[str]) -> dict[str, list[int]]:
        """What each mode's draft graph proposes on the buffers of the last real step."""
        speculator, proposed = self.model_runner.speculator, {}
        for name in names:
            self._mhc_graph("draft", tokens, name).replay()
            rows = speculator.draft_tokens[: tokens // speculator.num_speculative_steps]
            proposed[name] = rows.flatten().tolist()
        return proposed

    def _mhc_graph(self, part: str, tokens: int, name: str) -> Any:
        manager = self.mhc_graphs[name][("target", "draft").index(part)]
        for desc, graph in manager.graphs.items():
            if desc.num_tokens == tokens:
                return graph
        sizes = sorted(desc.num_tokens for desc in manager.graphs)
        raise ValueError(f"tokens must be one of the captured {sizes} for {part}, got {tokens}")

    @torch.inference_mode()
    def mhc_refit(self, seed: int | None) -> dict[str, Any]:
        """Load other mixing weights into the first draft layer, the way a trainer does; None loads the first ones back.

        Returns:
            Whether the derived weight follows, how far it is off, and whether it stayed where captured graphs read it.
        """
        draft = self.model_runner.speculator.model
        fn = draft.model.layers[0].hc_attn_fn
        if seed is None:
            new = self.mhc_first_fn
        else:
            self.mhc_first_fn = fn.detach().clone()
            generator = torch.Generator(device=fn.device).manual_seed(seed)
            new = torch.randn(fn.shape, generator=generator, device=fn.device) * 0.01
        self._mhc_use(None, None)  # as a server would run when it is refitted
        tensor = self.mhc_state.weight.tensor
        address = tensor.data_ptr()
        draft.load_weights([(f"mtp.0.{FN}", new)])
        now = self.mhc_state.weight.tensor
        folded = fn.detach().view(fn.shape[0], draft.model.hc_mult, -1).sum(1)
        error = (now - folded).abs().max().item()
        return {"same_storage": now.data_ptr() == address, "error": error, "follows": error < 1e-6}


def _count_eager(worker: Extension, speculator: Any) -> None:
    original = speculator._generate_draft

    def generate(*args: Any, **named: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return original(*args, **named)
        return _timed(worker, "eager", lambda: original(*args, **named))

    speculator._generate_draft = generate


def _count_replays(worker: Extension, manager: Any) -> None:
    original = manager.run_fullgraph
    manager.run_fullgraph = lambda desc: _timed(worker, "graph", lambda: original(desc))


def _timed(worker: Extension, kind: str, call: Any) -> Any:
    worker.mhc_counts[kind] += 1
    if worker.mhc_events is None:
        return call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = call()
    end.record()
    worker.mhc_events.append((start, end))
    return result
