"""Random targets and drafts for the tests of this folder."""

from dataclasses import replace

import torch
from scipy import stats

from mhc.config import MHCConfig
from mhc.dspark import DSparkDraft, Target, V4Config, initialise, to_inference


def make_pair(ffn="dense", vocab_size=32, dtype=torch.float32, seed=0, lively=6.0, **changes):
    """A random pair whose greedy texts vary; `lively` scales the matrices up from their training start."""
    config = replace(V4Config.tiny(ffn, vocab_size), **changes)
    target = initialise(Target(config), config, seed)
    draft = initialise(DSparkDraft(config).bind(target), config, seed + 1)
    with torch.no_grad():
        for model in (target, draft):
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(lively)
        for parameter in [*draft.markov_head.parameters(), *draft.confidence_head.parameters()]:
            parameter.mul_(4.0)  # heads that change what is proposed and verified
    for model in (target, draft):
        to_inference(model, dtype)
    return target, draft


def random_prompts(count, low=1, high=30, vocab_size=32, seed=0):
    """Prompts of different lengths without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def toy_pair(seed=0):
    """The smallest pair: six tokens, one draft layer, a block of three; for output distributions."""
    return make_pair(
        vocab_size=6,
        seed=seed,
        num_layers=2,
        aux_layers=(0, 1),
        draft_layers=1,
        block_size=3,
        num_heads=2,
        head_dim=8,
        ffn_width=16,
        mhc=MHCConfig(64, hc_mult=2, sinkhorn_iters=2),
    )


def chi_square(counts, probabilities):
    """p-value of observed counts; cells with an expectation below 5 are pooled."""
    counts, expected = counts.double(), probabilities.double() / probabilities.double().sum() * counts.sum()
    small = expected < 5
    observed = torch.cat((counts[~small], counts[small].sum().view(1)))
    expected = torch.cat((expected[~small], expected[small].sum().view(1)))
    keep = expected > 0
    assert observed[~keep].sum() == 0, "a token of probability zero was emitted"
    return stats.chisquare(observed[keep].numpy(), expected[keep].numpy()).pvalue
