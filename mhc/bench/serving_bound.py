"""How much a serving step can gain from its first pre: Amdahl's bound, from times alone.

With `t` the time of what is sped up, `N` how often it runs and `L` the whole time, no implementation of it, not even
one that takes no time, raises throughput by more than 1 / (1 - N t / L) - 1.
"""

from __future__ import annotations


def most_gain(part_us: float, calls: int, whole_s: float) -> float:
    """The largest relative gain in throughput from a part that then takes no time.

    Args:
        part_us: one call's time, us.
        calls: how many there are in the whole.
        whole_s: s.

    Raises:
        ValueError: the part is not shorter than the whole.
    """
    share = part_us * 1e-6 * calls / whole_s
    if not 0 <= share < 1:
        raise ValueError(f"part_us * calls must be shorter than whole_s, got {part_us} us * {calls} of {whole_s} s")
    return 1 / (1 - share) - 1


def most_steps(tokens: int) -> int:
    """The most draft steps that a batch served at once can take: each emits a token of every request at least.

    Args:
        tokens: new tokens a request; the step that reads the prompt drafts, too.
    """
    return tokens + 1


def expected_steps(tokens: int, draft_tokens: int, acceptance: float) -> float:
    """Draft steps when a share `acceptance` of the draft tokens is accepted; each emits one token more than that."""
    return tokens / (1 + draft_tokens * acceptance)


def step_parts(first_pre_us: float, draft_us: float, target_us: float, layers: int, of_layers: int) -> dict[str, float]:
    """An engine step's device time in parts, us, for another number of target layers (a projection unless equal).

    Args:
        first_pre_us: of the draft's first pre, part of the draft step.
        draft_us: the draft step.
        target_us: the target's part, of a model of `of_layers` layers; scaled as if all of it were layers.
        layers: wanted.
        of_layers: measured.
    """
    return {
        "first pre": first_pre_us,
        "rest of the draft step": draft_us - first_pre_us,
        "target and the rest": target_us * layers / of_layers,
    }
