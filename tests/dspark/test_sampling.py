"""Random numbers, sampling, and exact verification, on their own."""

import pytest
import torch
from dspark_pairs import chi_square
from scipy import stats

from mhc.dspark.drafting import Proposal, truncate
from mhc.dspark.philox import Stream, philox, uniform
from mhc.dspark.sampling import distribution, pick
from mhc.dspark.verification import verify

# Random123's published known answers for philox4x32, 10 rounds
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_known_answers(counter, key, want):
    words = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == want


def test_uniform_is_uniform_and_streams_are_independent():
    requests, positions = torch.arange(2000).unsqueeze(1), torch.arange(10)
    draws = [draw.flatten().numpy() for draw in uniform(7, list(Stream), requests, positions.expand(2000, -1))]
    for draw in draws:
        assert 0 <= draw.min() < draw.max() < 1
        assert stats.kstest(draw, "uniform").pvalue > 1e-3
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs(stats.pearsonr(draws[first], draws[second]).statistic) < 0.03


def test_uniform_depends_on_seed_request_and_position_alone():
    positions = torch.arange(6).expand(3, -1)
    requests = torch.tensor([[5], [9], [1 << 40]])
    alone = lambda seed, rows: uniform(seed, [Stream.DRAFT], requests[rows], positions[rows])[0]  # noqa: E731
    draws = uniform(3, list(Stream), requests, positions)[Stream.DRAFT]
    assert torch.equal(draws, alone(3, slice(None)))
    assert torch.equal(draws[1:], alone(3, slice(1, None)))
    assert len(draws.unique()) == 18
    assert not torch.equal(draws, alone(4, slice(None)))
    with pytest.raises(ValueError, match="seed must be 0"):
        alone(-1, slice(None))


def test_pick_inverts_the_cumulative_sum():
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]])
    levels = torch.tensor([0.0, 0.49, 0.5, 0.74, 0.75, 1 - 2.0**-52], dtype=torch.float64)
    got = [int(pick(weights, level.unsqueeze(0))) for level in levels]
    assert got == [1, 1, 3, 3, 4, 4], "tokens of weight zero are never picked, the ends included"


def test_pick_of_a_broken_row_stays_in_the_vocabulary():
    assert 0 <= int(pick(torch.full((1, 5), float("nan")), torch.tensor([0.5], dtype=torch.float64))) < 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution(temperature):
    logits = torch.tensor([1.0, 2.0, 4.0])
    want = torch.exp(logits / temperature) / torch.exp(logits / temperature).sum()
    torch.testing.assert_close(distribution(logits, temperature), want)


def test_truncate_cuts_at_the_first_doubt():
    confidence = torch.tensor([[0.9, 0.2, 0.9], [0.9, 0.9, 0.9], [0.1, 0.9, 0.9], [0.5, 0.5, float("nan")]])
    assert truncate(confidence, 0.5).tolist() == [1, 3, 0, 2]
    assert truncate(confidence[:3], 0.0).tolist() == [3, 3, 3]


def draws(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("length", [0, 1, 2])
def test_one_round_emits_the_targets_distribution(temperature, length):
    """Two tokens of vocabulary 4, all pairs: chi-square of what a round emits, whatever the draft's own law."""
    count, vocabulary = 40000, 4
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(1 + vocabulary, vocabulary, generator=generator) * 2  # row 0, then a row a first token
    q = distribution(torch.randn(1 + vocabulary, vocabulary, generator=generator) * 2, temperature)
    x1 = pick(q[0].expand(count, -1), draws(count, 1))
    x2 = pick(q[1 + x1], draws(count, 2))
    proposal = Proposal(
        torch.stack((x1, x2), 1), torch.stack((q[0].expand(count, -1), q[1 + x1]), 1), torch.ones(count, 2)
    )
    logits = torch.stack((target[0].expand(count, -1), target[1 + x1], target[1 + x2]), 1)
    accept, emit = draws(2 * count, 3).view(count, 2), draws(3 * count, 4).view(count, 3)
    verdict = verify(logits, proposal, torch.full((count,), length), temperature, accept, emit)
    assert verdict.accepted.max() <= length
    p = distribution(target, temperature)
    first = torch.bincount(verdict.tokens[:, 0], minlength=vocabulary)
    assert chi_square(first, p[0]) > 1e-3
    if length:
        both = verdict.accepted >= 1
        joint = torch.bincount(verdict.tokens[both, 0] * vocabulary + verdict.tokens[both, 1], minlength=16).view(4, 4)
        for token in range(vocabulary):
            if joint[token].sum() > 100:
                assert chi_square(joint[token], p[1 + token]) > 1e-3


def test_greedy_verification():
    logits = torch.full((2, 3, 5), -1.0)
    for row, token in enumerate((4, 2, 1)):
        logits[:, row, token] = 1.0
    proposal = Proposal(torch.tensor([[4, 3], [4, 2]]), None, torch.ones(2, 2))
    unused = torch.zeros(2, 3, dtype=torch.float64)
    verdict = verify(logits, proposal, torch.tensor([2, 2]), 0.0, unused[:, :2], unused)
    assert verdict.accepted.tolist() == [1, 2]
    assert verdict.tokens[0, :2].tolist() == [4, 2]
    assert verdict.tokens[1].tolist() == [4, 2, 1]


def test_temperatures_must_agree():
    proposal = Proposal(torch.zeros(1, 1, dtype=torch.long), None, torch.ones(1, 1))
    unused = torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"temperature must be the draft's .*, got 1\.0"):
        verify(torch.zeros(1, 2, 4), proposal, torch.tensor([1]), 1.0, unused[:, :1], unused)
