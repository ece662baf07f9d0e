"""An engine for the serving bench that is made up: no vLLM, no GPU, times that are constants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mhc.bench.serving_engine import Generated

STEP_US = {"unpatched": 3400.0, "vllm_kernel": 3394.0, "mhc": 3386.0, "mhc_post_pre": 3380.0}


class Fake:
    """An engine that takes `STEP_US` for a draft step, twice that for a target step, and counts as the worker does.

    `diverges` gives the modes whose second request ends differently; `absent` those that cannot run.
    """

    def __init__(self, diverges: Sequence[str] = (), absent: Sequence[str] = (), time_s: float = 0.0) -> None:
        self.diverges, self.absent, self.time_s = diverges, absent, time_s
        self.mode, self.graphs, self.captured, self.counts, self.fn = "", False, [], Counter(), 0
        self.log, self.drafts, self.clock_s = [], 0, 0.0

    def generate(self, batch, tokens, seed):
        assert not self.graphs or self.mode in self.captured
        self.clock_s += self.time_s
        self.counts["graph" if self.graphs else "eager"] += tokens
        self.drafts += batch * tokens
        self.log.append((self.mode, self.graphs, batch, tokens))
        rows = [[row * 1000 + i for i in range(tokens)] for row in range(batch)]
        if self.mode in self.diverges:
            rows[1][-1] += 1
        return Generated(self.time_s or STEP_US.get(self.mode, 1.0) * 3e-6 * tokens, rows)

    def next_logprobs(self, prompt):
        return {prompt[-1] + 1: -1.25, prompt[-1] + 2: -1.26}

    def accepted(self):
        return {"num_drafts": float(self.drafts), "num_accepted_tokens": 0.5 * self.drafts}

    def call(self, method, *args):
        return getattr(self, method)(*args)

    def mhc_start(self):
        return {"first_pre_kernels": ["fused", "vllm"]}

    def mhc_available(self, name):
        return "made up to be absent" if name in self.absent else ""

    def mhc_capture(self, name):
        self.captured.append(name)
        return {"fused": 2}

    def mhc_switch(self, name, graphs):
        self.mode, self.graphs = name, graphs

    def mhc_reset(self, timed):
        self.counts, self.timed = Counter(), timed

    def mhc_counted(self):
        steps = self.counts["eager"] + self.counts["graph"]
        times = [STEP_US[self.mode]] * steps if self.timed else []
        return {"eager_steps": self.counts["eager"], "graph_steps": self.counts["graph"], "first_pre_fused": 3,
                "draft_us": times}  # fmt: skip

    def mhc_replay(self, part, tokens, names, rounds, seed):
        factor = {"draft": 1, "target": 2}[part]
        return {name: [factor * (STEP_US[name] + (i % 3)) for i in range(rounds)] for name in names}

    def mhc_draft_tokens(self, tokens, names):
        return {name: [self.fn + i for i in range(tokens)] for name in names}

    def mhc_kernels(self, tokens, name):
        return [("gather", 2.1), ("repeat", 5.5)] + [("other", 1.0)] * 20 if name == "unpatched" else [("fused", 4.0)]

    def mhc_refit(self, seed):
        self.fn = 0 if seed is None else seed
        return {"same_storage": True, "error": 1e-8, "follows": True}
