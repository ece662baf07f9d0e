"""One draft round taken apart: each part as a closure on inputs of the right shapes, for timing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mhc.arithmetic import steps_bf16
from mhc.dspark import hyper
from mhc.dspark.config import V4Config
from mhc.dspark.draft import DSparkDraft
from mhc.dspark.drafting import propose
from mhc.dspark.expansion import expand
from mhc.dspark.initialise import initialise, to_inference
from mhc.dspark.target import SharedEmbeddings


def random_draft(config: V4Config, device: str | torch.device, seed: int = 0) -> DSparkDraft:
    """A bf16 draft of any size with random weights and embeddings of its own; fp32 copies are never held."""
    with torch.device("meta"):
        shared, draft = SharedEmbeddings(config), DSparkDraft(config)
    for module in (shared, draft):
        to_inference(module)
        module.to_empty(device=device)
        initialise(module, config, seed)
    return draft.bind(shared)


@torch.no_grad()
def arms_difference(draft: DSparkDraft, requests: int, context_length: int, expansion: str) -> dict[str, float]:
    """How far an arm is from `repeat` on the same inputs: largest absolute differences, and what they compare to.

    Returns:
        `layer_input` (of the first pre) and `logits`, each with the largest value beside it, `layer_input_steps`: the
        same in bf16 steps, and `argmax`: the share of rows whose best token differs.
    """
    found = {}
    for arm in ("repeat", expansion):
        parts = draft_parts(draft, requests, context_length, arm)
        found[arm] = (parts["first_pre"]().layer_input, parts["forward"]().logits)
    (x, logits), (other_x, other_logits) = found["repeat"], found[expansion]
    return {
        "layer_input": (x.float() - other_x.float()).abs().max().item(),
        "layer_input_max": x.abs().max().item(),
        "layer_input_steps": steps_bf16(x, other_x).max().item(),
        "logits": (logits - other_logits).abs().max().item(),
        "logits_max": logits.abs().max().item(),
        "argmax": (logits.argmax(-1) != other_logits.argmax(-1)).float().mean().item(),
    }


@torch.no_grad()
def draft_parts(
    draft: DSparkDraft, requests: int, context_length: int, expansion: str, seed: int = 0
) -> dict[str, Callable[[], Any]]:
    """The parts of one draft round of R requests.

    Args:
        draft: in inference mode.
        requests: R; a block is `draft.config.block_size` rows.
        context_length: context rows of every request.
        expansion: of the first layer.
        seed: of ids and aux states.

    Returns:
        `forward` is the whole backbone with its logits; `first_pre` (the embedding's look-up included), `attention`,
        `ffn`, `post_pre` (all of them, the last post included), `head`, `logits` make it up; `context` inserts k + 1
        verified rows a request and `markov` samples the block at temperature 1.
    """
    config, device = draft.config, draft.main_proj.weight.device
    size, mhc = config.block_size, config.mhc
    generator = torch.Generator(device=device).manual_seed(seed)
    aux_width = len(config.aux_layers) * config.hidden_size
    aux = torch.randn(requests, context_length, aux_width, generator=generator, device=device).to(torch.bfloat16)
    context = draft.context(requests, context_length + size + 1)
    draft.insert_context(context, aux, torch.arange(context_length, device=device).expand(requests, -1))
    anchors = torch.randint(config.vocab_size, (requests,), generator=generator, device=device)
    token_ids, positions = draft.block(anchors, torch.full_like(anchors, context_length))
    fresh = torch.randn(requests, size + 1, aux_width, generator=generator, device=device).to(torch.bfloat16)
    fresh_positions = (context_length + torch.arange(size + 1, device=device)).expand(requests, -1)

    output = draft(token_ids, positions, context, expansion=expansion)
    first = expand(draft, token_ids.flatten(), expansion)
    rows = first.layer_input.view(requests, size, -1)
    streams = hyper.post_pre(first.layer_input, first, draft.layers[0].ffn_site, mhc)
    rotation = draft.angles(positions)
    mask = draft._visible(positions[:, :1], context.positions()).expand(-1, size, -1)
    uniform = torch.rand(requests, size, generator=generator, device=device, dtype=torch.float64)

    def attention() -> list[Tensor]:
        outputs = []
        for layer, block in enumerate(draft.layers):
            own = block.attn.latent(rows, rotation).unsqueeze(1)
            outputs.append(block.attn(rows, rotation, context.read(layer), mask, own))
        return outputs

    def post_pre() -> list[object]:
        sites = [site for block in draft.layers for site in (block.attn_site, block.ffn_site)][1:]
        # the first of them takes the streams as the arm left them
        mixes = [first, *[streams] * (len(sites) - 1)]
        mixed: list[object] = [hyper.post_pre(first.layer_input, *pair, mhc) for pair in zip(mixes, sites, strict=True)]
        return [*mixed, hyper.post(first.layer_input, streams)]

    parts: dict[str, Callable[[], Any]] = {
        "forward": lambda: draft(token_ids, positions, context, expansion=expansion),
        "first_pre": lambda: expand(draft, token_ids.flatten(), expansion),
        "attention": attention,
        "ffn": lambda: [block.ffn(first.layer_input) for block in draft.layers],
        "post_pre": post_pre,
        "head": lambda: hyper.head(streams.residual, draft.hc_head_fn, draft.hc_head_scale, draft.hc_head_base, mhc),
        "logits": lambda: draft.base_logits(output.hidden),
        "context": lambda: draft.insert_context(context, fresh, fresh_positions),
        "markov": lambda: propose(draft, output, anchors, 1.0, uniform),
    }
    return {name: torch.no_grad()(part) for name, part in parts.items()}
