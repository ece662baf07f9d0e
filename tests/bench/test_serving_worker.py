"""What the serving bench does inside a worker, on a runner, a draft and graphs that are made up."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

import mhc
from mhc.bench.serving_worker import MODES, Extension
from mhc.vllm_plugin.first_pre import STATE
from mhc.vllm_plugin.patch import POST_PRE_OP
from mhc.vllm_plugin.post_pre import PostPre

CONFIG = mhc.MHCConfig(64, 4)
LAYERS = "vllm.models.deepseek_v4.nvidia.model"


class Event:
    """A CUDA event whose clock is the number of replays so far, in ms."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = len(Graph.log)

    def elapsed_time(self, end):
        return float(end.at - self.at)


class Graph:
    log: ClassVar[list] = []

    def __init__(self, name, effect=lambda: None):
        self.name, self.effect = name, effect

    def replay(self):
        Graph.log.append(self.name)
        self.effect()


class Manager:
    """A graph manager; what it captures remembers how the process ran then."""

    def __init__(self, vllm_config, device, cudagraph_mode, decode_query_len, lora_capture_cases=None):
        self.vllm_config, self.device, self.cudagraph_mode = vllm_config, device, cudagraph_mode
        self.decode_query_len, self.lora_capture_cases = decode_query_len, lora_capture_cases
        self.graphs, self._graphs_captured = {}, False

    def capture(self, name, effect=lambda: None):
        for requests in (1, 16):
            desc = SimpleNamespace(num_tokens=requests * self.decode_query_len)
            self.graphs[id(desc), desc.num_tokens] = Graph((name, desc.num_tokens), effect)
        self.graphs = {SimpleNamespaceKey(tokens): graph for (_, tokens), graph in self.graphs.items()}
        self._graphs_captured = True

    def run_fullgraph(self, desc):
        self.graphs[desc].replay()


class SimpleNamespaceKey:
    def __init__(self, num_tokens):
        self.num_tokens = num_tokens


class Speculator:
    num_speculative_steps = 7

    def __init__(self, runner, model):
        self.runner, self.model = runner, model
        self.draft_tokens = torch.zeros(64, 7, dtype=torch.int64)
        self.init_cudagraph_manager("FULL")

    def init_cudagraph_manager(self, mode):
        self.query_cudagraph_manager = Manager(None, None, mode, 7)

    def capture(self):
        first = self.model.model.__dict__[STATE].kernels
        self._generate_draft()
        fill = len(first) + 1
        self.query_cudagraph_manager.capture(("draft", first), lambda: self.draft_tokens.fill_(fill))

    def _generate_draft(self):
        state = self.model.model.__dict__[STATE]
        if state.kernels:
            state.calls[state.kernels[0]] += 1
        return "draft"


class Draft(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        layer = nn.Module()
        layer.hc_attn_fn = nn.Parameter(torch.randn(CONFIG.mix_rows, 4 * 64), requires_grad=False)
        layer.attn = nn.Identity()
        self.model.layers, self.model.hc_mult = nn.ModuleList([layer]), 4
        self.weight = mhc.BroadcastWeight(layer.hc_attn_fn, 4)

    def load_weights(self, weights):
        for name, value in weights:
            assert name == "mtp.0.hc_attn_fn"
            self.model.layers[0].hc_attn_fn.copy_(value)
        if self.weight is not None:
            self.weight.refresh(self.model.layers[0].hc_attn_fn)


class Runner:
    def __init__(self):
        draft = Draft()
        state = SimpleNamespace(kernels=("fused", "vllm"), calls={"fused": 0, "vllm": 0}, weight=draft.weight)
        draft.model.__dict__[STATE] = state
        self.cudagraph_manager = Manager("config", "cuda", "FULL", 8, [0])
        self.speculator = Speculator(self, draft)
        self.captures = 0

    def capture_model(self):
        self.captures += 1
        ours = isinstance(getattr(sys.modules[LAYERS], POST_PRE_OP), PostPre)
        self.cudagraph_manager.capture(("target", ours))
        self.speculator.capture()


@pytest.fixture
def worker(monkeypatch):
    for name in ("vllm", "vllm.models", "vllm.models.deepseek_v4", "vllm.models.deepseek_v4.nvidia", LAYERS):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    post_pre = PostPre(lambda *args: "vllm's")
    post_pre.verdicts[CONFIG] = True
    layers = sys.modules[LAYERS]
    setattr(layers, POST_PRE_OP, post_pre)
    monkeypatch.setattr(sys.modules["vllm.models.deepseek_v4.nvidia"], "model", layers, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    Graph.log = []
    made = Extension()
    made.model_runner = Runner()
    made.model_runner.capture_model()  # vLLM's own start-up
    return made


def test_start_says_what_runs_and_keeps_the_graphs_of_the_start_up(worker):
    found = worker.mhc_start()
    assert found["first_pre_kernels"] == ["fused", "vllm"]
    assert found["post_pre_ours"]
    assert found["derived_weight_shape"] == [24, 64]
    assert list(worker.mhc_graphs) == ["mhc_post_pre"]
    assert worker.mhc_capture("mhc_post_pre") == {}
    assert worker.model_runner.captures == 1


def test_without_the_plugin_it_refuses(worker):
    del worker.model_runner.speculator.model.model.__dict__[STATE]
    with pytest.raises(RuntimeError, match="did not patch"):
        worker.mhc_start()


def test_each_mode_is_captured_in_its_way_and_targets_are_shared(worker):
    worker.mhc_start()
    calls = {name: worker.mhc_capture(name) for name in ("unpatched", "vllm_kernel", "mhc")}
    assert worker.model_runner.captures == 2  # the start-up's, and one with vLLM's post + pre
    assert calls["unpatched"] == {"fused": 0, "vllm": 0}
    assert calls["vllm_kernel"] == {"fused": 0, "vllm": 1}
    assert calls["mhc"] == {"fused": 1, "vllm": 0}
    kernels = {"unpatched": (), "vllm_kernel": ("vllm",), "mhc": ("fused", "vllm"), "mhc_post_pre": ("fused", "vllm")}
    for name, (target, draft) in worker.mhc_graphs.items():
        assert {graph.name[0] for graph in draft.graphs.values()} == {("draft", kernels[name])}
        assert {graph.name[0] for graph in target.graphs.values()} == {("target", MODES[name].ours_post_pre)}
    assert worker.mhc_graphs["unpatched"][0] is worker.mhc_graphs["mhc"][0]


def test_switch_changes_kernels_post_pre_and_graphs(worker):
    worker.mhc_start()
    worker.mhc_capture("unpatched")
    runner, state = worker.model_runner, worker.mhc_state
    worker.mhc_switch("mhc_post_pre", True)
    assert state.kernels == ("fused", "vllm")
    assert isinstance(getattr(worker.mhc_layers, POST_PRE_OP), PostPre)
    assert runner.speculator.query_cudagraph_manager is worker.mhc_graphs["mhc_post_pre"][1]
    assert runner.cudagraph_manager._graphs_captured
    worker.mhc_switch("unpatched", False)
    assert state.kernels == ()
    assert getattr(worker.mhc_layers, POST_PRE_OP)() == "vllm's"
    assert runner.speculator.query_cudagraph_manager is worker.mhc_graphs["unpatched"][1]
    assert not runner.cudagraph_manager._graphs_captured
    assert not runner.speculator.query_cudagraph_manager._graphs_captured


def test_modes_that_cannot_run_say_why(worker):
    worker.mhc_start()
    assert worker.mhc_available("mhc") == worker.mhc_available("mhc_post_pre") == ""
    assert "made no token table" in worker.mhc_available("mhc_table")
    worker.mhc_loaded = ("vllm",)
    assert "accepted vllm, not fused" in worker.mhc_available("mhc_fused")
    worker.mhc_loaded = ("fused",)
    assert worker.mhc_available("vllm_kernel") == ""
    worker.mhc_post_pre.verdicts[CONFIG] = False
    assert "post + pre is not active" in worker.mhc_available("mhc_post_pre")
    worker.mhc_loaded = ()
    assert "accepted no kernel" in worker.mhc_available("mhc")
    assert worker.mhc_available("unpatched") == ""


def test_a_token_table_is_used_where_the_mode_says_and_in_a_refit(worker):
    state = worker.model_runner.speculator.model.model.__dict__[STATE]
    state.look_up = look_up = SimpleNamespace(table="the table")
    assert worker.mhc_start()["token_table"]
    used = {}
    for name in MODES:
        assert worker.mhc_available(name) == ""
        worker.mhc_switch(name, False)
        used[name] = state.look_up is look_up
    assert used == {
        "unpatched": False, "vllm_kernel": False, "mhc": True, "mhc_fused": False, "mhc_table": True,
        "mhc_post_pre": True,
    }  # fmt: skip
    worker.mhc_switch("unpatched", False)
    worker.mhc_refit(1)
    assert state.look_up is look_up  # a table that nobody holds could not follow


def test_steps_are_counted_and_timed_apart(worker):
    worker.mhc_start()
    worker.mhc_reset(timed=True)
    speculator = worker.model_runner.speculator
    assert speculator._generate_draft() == "draft"
    manager = speculator.query_cudagraph_manager
    manager.run_fullgraph(next(iter(manager.graphs)))
    counted = worker.mhc_counted()
    assert (counted["eager_steps"], counted["graph_steps"]) == (1, 1)
    assert counted["first_pre_fused"] == 1
    assert counted["draft_us"] == [0.0, 1000.0]  # the second one holds one replay
    worker.mhc_reset()
    speculator._generate_draft()
    assert worker.mhc_counted()["draft_us"] == []


def test_replays_take_turns_in_an_order_drawn_anew(worker):
    worker.mhc_start()
    names = ["unpatched", "vllm_kernel", "mhc"]
    for name in names:
        worker.mhc_capture(name)
    Graph.log = []
    times = worker.mhc_replay("draft", 112, names, 20, seed=3)
    assert {name: len(samples) for name, samples in times.items()} == dict.fromkeys(names, 20)
    assert all(sample == 1000.0 for samples in times.values() for sample in samples)
    rounds = [tuple(Graph.log[12 + 3 * i : 15 + 3 * i]) for i in range(20)]  # after four warm-ups of each
    assert all(len(set(order)) == 3 for order in rounds)
    assert len(set(rounds)) > 1
    with pytest.raises(ValueError, match=r"one of the captured \[7, 112\] for draft, got 448"):
        worker.mhc_replay("draft", 448, names, 2, 0)
    assert worker.mhc_replay("target", 128, ["unpatched"], 2, 0) == {"unpatched": [1000.0, 1000.0]}


def test_draft_tokens_are_those_of_the_mode(worker):
    worker.mhc_start()
    worker.mhc_capture("unpatched")
    proposed = worker.mhc_draft_tokens(112, ["unpatched", "mhc_post_pre"])
    assert proposed == {"unpatched": [1] * 112, "mhc_post_pre": [3] * 112}


def test_refit_and_back(worker):
    worker.mhc_start()
    fn = worker.model_runner.speculator.model.model.layers[0].hc_attn_fn
    first = fn.clone()
    done = worker.mhc_refit(5)
    assert done["follows"]
    assert done["same_storage"]
    assert not torch.equal(fn, first)
    assert worker.mhc_refit(None)["follows"]
    assert torch.equal(fn, first)


def test_a_derived_weight_that_does_not_follow_is_seen(worker):
    worker.mhc_start()
    worker.model_runner.speculator.model.weight = None  # the hook is gone
    assert not worker.mhc_refit(5)["follows"]
