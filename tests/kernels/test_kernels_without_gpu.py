"""Every kernel, without a GPU: its generated CUDA run on the CPU against fp64, and compiled for sm_90a."""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cuda_on_cpu.compile import Usage
from cuda_on_cpu.lowering import lower

from mhc import launch
from mhc.config import MHCConfig
from mhc.kernels.parts import PASS_CONFIGS
from mhc.kernels.quad_dot import WORKERS
from mhc.kernels.quad_finish import BATCH, HELPERS, THREADS

from . import checks, mutants
from .builds import FEWEST, Builds, Variant, build_cubins, lowered, variants
from .checks import ANY, EVERY_TILE, FEW, REAL, SMALL, SMALL_QUAD, Case, Check, inputs
from .conftest import EmulatedLaunch
from .table import OPS, Op, op_named

pytestmark = pytest.mark.timeout(1800)  # a test may wait for all that is still being built


def cases(check: Check, tokens: tuple[int, ...], *hidden: int) -> Any:
    return pytest.mark.parametrize("case", [Case(check, op, h, tokens) for h in hidden for op in ops(h)], ids=str)


def normed_cases(check: Check, tokens: tuple[int, ...], scarce: bool = False) -> Any:
    """At the small H, without the unnormed ops; with a single cluster only those that it makes a difference to."""
    chosen = [Case(check, op, h, tokens, scarce) for h in (SMALL, SMALL_QUAD) for op in ops(h)]
    chosen = [c for c in chosen if not c.op.name.endswith("unnormed")]
    chosen = [c for c in chosen if not scarce or c.variants() != replace(c, scarce=False).variants()]
    return pytest.mark.parametrize("case", chosen, ids=str)


def launched_by(op: Op, config: MHCConfig) -> list[str]:
    return [variant[0] for variant in variants(op, config, (1,))]


def ops(hidden: int) -> list[Op]:
    """All at the small H; at the others no variations that have nothing to do with H, to save a minute."""
    if hidden == SMALL_QUAD:
        return [op for op in OPS if launched_by(op, MHCConfig(hidden)) == ["quad"]]
    rare = {SMALL: (), REAL[0]: ("unnormed", "int32")}.get(hidden, ("unnormed", "int32", "pre_collapsed", "table"))
    return [op for op in OPS if not any(word in op.name for word in rare)]


@cases(checks.against_fp64, FEW, SMALL, SMALL_QUAD, *REAL)
def test_generated_cuda_against_fp64(case: Case, builds: Builds) -> None:
    case.begin_check(builds).result()


@pytest.mark.parametrize("hidden", [SMALL, 4096])
def test_no_tokens_no_launch(hidden: int, on_emulator: EmulatedLaunch) -> None:
    for op in ops(hidden):
        p = inputs(MHCConfig(hidden)).rows(0)
        got = op.call(p)
        assert on_emulator.launches == 0, op
        assert [t.shape for t in got] == [t.shape for t in op.value(p, got)], op


@normed_cases(checks.a_row_is_the_same_at_every_t, EVERY_TILE)
def test_a_row_is_bitwise_the_same_at_every_t(case: Case, builds: Builds) -> None:
    case.begin_check(builds).result()


@normed_cases(checks.a_cluster_takes_many_tiles, (1,), scarce=True)
def test_a_cluster_takes_many_tiles(case: Case, builds: Builds) -> None:
    case.begin_check(builds).result()


QUAD_STEPS = FEWEST["quad"] * BATCH * HELPERS + 3


@pytest.mark.parametrize(
    "case",
    [
        Case(checks.comb_of_more_steps_than_a_batch, op_named(name), hidden, (tokens,), scarce=True, hc=hc)
        for name, hidden, tokens, hcs in (
            ("post_pre", SMALL_QUAD, QUAD_STEPS, (4,)),
            ("pre_broadcast-fused", SMALL, 2 * 32 + 3, range(2, 9)),
        )
        for hc in hcs
    ],
    ids=str,
)
def test_comb_of_more_steps_than_a_batch(case: Case, builds: Builds) -> None:
    case.begin_check(builds).result()


@cases(checks.a_nan_stays_in_its_row, (65,), SMALL, SMALL_QUAD)
def test_a_nan_stays_in_its_row(case: Case, builds: Builds) -> None:
    case.begin_check(builds).result()


@pytest.mark.parametrize("hidden", [SMALL, SMALL_QUAD, *REAL])
@pytest.mark.parametrize("hc", [2, 4, 8])
def test_warmup_knows_every_kernel_that_an_op_reaches(hidden: int, hc: int) -> None:
    config = MHCConfig(hidden, hc)
    reached = {variant for op in OPS for variant in variants(op, config, ANY)}
    assert reached <= set(launch.reachable(config, max(ANY)))


@dataclass(frozen=True)
class Cubins:
    """What is compiled at one H: what runs here and the smallest, a middle and the largest tile."""

    hidden: int

    def variants(self) -> list[Variant]:
        found: dict[Variant, None] = {}
        for op in ops(self.hidden) if self.hidden == SMALL_QUAD else OPS:
            normed, small = not op.name.endswith("unnormed"), self.hidden == SMALL
            if normed or small:
                tokens = EVERY_TILE if normed and small else (*FEW, EVERY_TILE[-1]) if normed else FEW
                found |= dict.fromkeys(variants(op, MHCConfig(self.hidden), tokens))
        if self.hidden == SMALL:
            found |= dict.fromkeys(v for hc in (2, 3) for v in variants(op_named("post_pre"), MHCConfig(320, hc), (1,)))
        return list(found)

    def begin(self, builds: Builds) -> Future[list[tuple[Variant, list[Usage]]]]:
        return builds.submit(self, build_cubins, self.variants())

    def __str__(self) -> str:
        return str(self.hidden)


CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
OTHER_SPILL_BYTES = {"quad": 1024}  # 912 were seen with 0.1.15, at H 4096


@pytest.mark.parametrize("cubins", [Cubins(h) for h in (SMALL, SMALL_QUAD, *REAL)], ids=str)
def test_compiles_for_sm90a_without_spills(cubins: Cubins, builds: Builds) -> None:
    compiled = cubins.begin(builds).result()
    assert compiled
    assert all(len(kernels) == 1 for _, kernels in compiled)
    found = [(variant[0], variant[2:], kernels[0]) for variant, kernels in compiled if kernels[0].spills]
    spilling = [
        f"{name} {args} {usage}" for name, args, usage in found if not usage.spill_load_bytes <= spill_limit(name) > 0
    ]
    assert not spilling, "\n".join(spilling)


def spill_limit(name: str) -> int:
    """Bytes a thread may read back: none with the pinned TileLang; `quad` fills its registers to the last there."""
    pinned = f"tilelang=={version('tilelang')}" in CONSTRAINTS.read_text().splitlines()
    return 0 if pinned else OTHER_SPILL_BYTES.get(name, 0)


def test_workers_take_no_more_registers_than_helpers_leave(builds: Builds) -> None:
    """Or `quad` would wait for them for ever, which the emulator, without registers, cannot show."""
    compiled = [usages for h in (SMALL_QUAD, REAL[0]) for usages in Cubins(h).begin(builds).result()]
    found = [(variant, usage) for variant, (usage,) in compiled if variant[0] == "quad"]
    assert {variant[-1] for variant, _ in found} == {"pre", "post_pre", "post_pre_collapsed"}
    for variant, usage in found:
        source = lowered(variant).source
        taken, left = (int(n) for n in re.findall(r"tl::warpgroup_reg_(?:de)?alloc<(\d+)>", source))
        assert WORKERS * taken + (THREADS - WORKERS) * left <= THREADS * usage.registers, variant


def test_what_runs_is_what_compiles() -> None:
    """The passes that the emulator turns off make no difference to these kernels."""
    by_name = {v[0]: v for h in (SMALL, SMALL_QUAD) for op in OPS for v in variants(op, MHCConfig(h), (1,))}
    for variant in by_name.values():
        assert lower(launch.prim_func(*variant), PASS_CONFIGS).source == lowered(variant).source


@pytest.mark.parametrize("victim", mutants.VICTIMS, ids=str)
def test_planted_bugs_are_noticed(victim: mutants.Victim, builds: Builds) -> None:
    """Barriers of a real kernel removed, each output's stores shifted: all but the odd redundant barrier show."""
    emulated, barriers = builds.emulated(victim.variant), victim.removals()
    edits = (*barriers, *emulated.written)
    jobs = [builds.submit(("mutant", victim, edit), mutants.verdict, victim, edit) for edit in edits]
    verdicts = [job.result() for job in jobs]
    assert not [v for v in verdicts[len(barriers) :] if v.endswith("unnoticed")]
    missed = [v for v in verdicts if v.endswith("unnoticed")]
    assert len(barriers) >= 5
    assert len(missed) <= victim.redundant, missed
