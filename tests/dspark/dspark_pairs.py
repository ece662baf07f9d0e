"""Random targets and drafts for the tests of this folder."""

from dataclasses import replace

import torch

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
    for model in (target, draft):
        to_inference(model, dtype)
    return target, draft


def random_prompts(count, low=1, high=30, vocab_size=32, seed=0):
    """Prompts of different lengths without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]
