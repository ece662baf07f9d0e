"""The cached target against its own whole-sequence forward, ragged batches, training."""

import pytest
import torch
from dspark_pairs import make_pair, random_prompts

from mhc.dspark.prefill import prefill

TOKENS = torch.randint(4, 32, (3, 50), generator=torch.Generator().manual_seed(3))
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("ffn", ["dense", "moe"])
@pytest.mark.parametrize("cuts", [[50], [1] * 50, [20, 3, 27]])
@torch.no_grad()
def test_steps_equal_the_whole_forward(ffn, cuts):
    target, _ = make_pair(ffn)
    whole = target(TOKENS)
    cache, start = target.cache(3, 60), 0
    for size in cuts:
        positions = torch.arange(start, start + size).expand(3, -1)
        part = target.step(TOKENS[:, start : start + size], positions, cache)
        torch.testing.assert_close(part.hidden, whole.hidden[:, start : start + size], **CLOSE)
        torch.testing.assert_close(part.aux, whole.aux[:, start : start + size], **CLOSE)
        start += size


@torch.no_grad()
def test_attention_is_causal_within_the_window(pair):
    target, _ = pair
    changed = TOKENS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 28 + 4
    moved = (target(changed).hidden - target(TOKENS).hidden).abs().amax(-1)[0] > 0
    reach = 5 + target.config.num_layers * (target.config.sliding_window - 1)
    assert not moved[:5].any(), "a later token changed an earlier row"
    assert moved[5:20].all()
    assert reach > 50, "stacked windows reach further than one window"


@torch.no_grad()
def test_rejected_rows_leave_no_trace(pair):
    """Rows that were computed but not kept, then overwritten: the KV crop."""
    target, _ = pair
    cache = target.cache(3, 60)
    positions = torch.arange(50).expand(3, -1)
    target.step(TOKENS[:, :30], positions[:, :30], cache)
    valid = torch.arange(5).expand(3, -1) < torch.tensor([[0], [2], [5]])
    target.step(TOKENS[:, 30:35].flip(1), positions[:, 30:35], cache, valid)  # wrong tokens, partly kept
    again = target.step(TOKENS[:, 30:], positions[:, 30:], cache)
    torch.testing.assert_close(again.hidden, target(TOKENS).hidden[:, 30:], **CLOSE)


@torch.no_grad()
def test_a_bad_row_stays_in_its_request(bf16_pair):
    target, _ = bf16_pair
    cache = target.cache(3, 60)
    positions = torch.arange(20).expand(3, -1)
    clean = target.step(TOKENS[:, :20], positions, cache).hidden
    cache.rows[:, 1] = float("nan")
    dirty = target.step(TOKENS[:, 20:21], positions[:, :1] + 20, cache).hidden
    assert dirty[1].isnan().any()
    assert not dirty[[0, 2]].isnan().any()
    assert not clean.isnan().any()


@pytest.mark.parametrize("chunk", [16, 1000])
def test_prefill_of_ragged_prompts(pair, monkeypatch, chunk):
    target, draft = pair
    prompts = random_prompts(5, high=40)
    elements = chunk * len(prompts) * target.config.num_heads * (max(map(len, prompts)) + 8)
    monkeypatch.setattr("mhc.dspark.prefill.SCORE_ELEMENTS", elements)
    with torch.no_grad():
        _, logits, lengths = prefill(target, draft, prompts, [], 8)
        assert lengths.tolist() == [len(prompt) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            want = target.logits(target(torch.tensor([prompt])).hidden)[0, -1]
            torch.testing.assert_close(logits[row], want, **CLOSE)


def test_training_fits_a_repeated_sequence():
    target, _ = make_pair(lively=1.0)
    target.requires_grad_(True).train()
    optimiser = torch.optim.AdamW(target.parameters(), lr=3e-3)
    tokens = TOKENS[:, :24]
    losses = []
    for _ in range(30):
        logits = target.logits(target(tokens).hidden)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_every_weight_gets_a_gradient():
    target, _ = make_pair("moe")
    target.requires_grad_(True)
    target.logits(target(TOKENS).hidden).square().mean().backward()
    without = [name for name, parameter in target.named_parameters() if parameter.grad is None]
    # experts are chosen by the correction bias, which load balancing moves, not the gradient
    assert without == [f"layers.{layer}.ffn.gate.bias" for layer in range(4)]
