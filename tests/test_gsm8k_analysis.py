"""Where two arms first differ: nowhere against itself, often against a crooked arm, explained by their logits."""

from __future__ import annotations

import pytest
import torch

from mhc.dspark import DSparkDraft
from mhc.dspark.corpus import Sample
from mhc.dspark.expansion import EXPANSIONS, repeat
from mhc.gsm8k import live
from mhc.gsm8k.analysis import EXAMPLES, differences
from mhc.ops import PreOutput


def crooked(draft: DSparkDraft, token_ids: torch.Tensor) -> PreOutput:
    mix = repeat(draft, token_ids)
    return mix._replace(layer_input=mix.layer_input.flip(0))


def test_differing_drafts_are_counted_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPANSIONS, "crooked", crooked)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(4, 260, (12, 40), generator=generator).tolist()
    samples = [Sample(tuple(text), 5) for text in texts]
    records = differences(live.random_pair(), samples, "repeat", ["repeat", "crooked"])
    same, other, *flips = records
    assert (same["arm"], same["differing"], same["logit_error"]) == ("repeat", 0, 0)
    assert other["arms"] == ["repeat", "crooked"]
    assert same["blocks"] == other["blocks"] == 8 * len(samples)
    assert EXAMPLES == len(flips) < other["differing"] == sum(other["first_position"])
    for flip in flips:
        assert flip["arm"] == "crooked"
        assert flip["tokens"][0] != flip["tokens"][1]
        # the baseline chose its token, the other arm the other one: the logits moved by at least the lead
        assert 0 <= flip["gap"] <= flip["logit_error"] + 1e-5
