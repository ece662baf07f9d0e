"""Faults that real implementations shipped, each a function that puts it in through a monkeypatch."""

import functools

import torch

import mhc.dspark.attention
import mhc.dspark.batch
import mhc.dspark.block
import mhc.dspark.checkpoint
import mhc.dspark.decode
import mhc.dspark.prefill
import mhc.dspark.rounds
import mhc.gsm8k.stats
from mhc.checkpoint import Checkpoint
from mhc.dspark import DSparkDraft
from mhc.dspark.batch import Batch
from mhc.dspark.philox import Stream
from mhc.dspark.prefill import Caches
from mhc.dspark.verification import Verdict
from mhc.table import TokenTable
from mhc.weights import BroadcastWeight


def wrap(patch, owner, name, fault):
    """Replace `owner.name` by `fault(original, ...)`."""
    patch.setattr(owner, name, functools.partial(fault, getattr(owner, name)))


def method(patch, owner, name, fault):
    """Replace a method by `fault(original, self, ...)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args, **kwargs: fault(original, self, *args, **kwargs))


# ---- derived weight ----


def stale_after_refit(patch):
    # made once, never again; and nobody looks at whether it is fresh
    method(
        patch,
        BroadcastWeight,
        "refresh",
        lambda run, self, fn=None: self._tensor if self._tensor is not None else run(self, fn),
    )
    patch.setattr(BroadcastWeight, "is_stale", lambda self, content=False: False)


def rebound_after_refit(patch):
    def hook(self):
        self._broadcast = BroadcastWeight(self.layers[0].hc_attn_fn, self.config.mhc.hc_mult)

    patch.setattr(DSparkDraft, "process_weights_after_loading", hook)


def none_after_dummy_load(patch):
    # the weight is derived in the loader only, the hook knows nothing of it
    patch.setattr(DSparkDraft, "process_weights_after_loading", lambda self: None)


def first_pipeline_rank_only(patch):
    def hook(run, self):
        if getattr(self, "pipeline_rank", 0) == 0:
            run(self)

    method(patch, DSparkDraft, "process_weights_after_loading", hook)


def stale_table_after_refit(patch):
    # the folded projection is refreshed, the table made from it is not; and nobody looks at whether it is fresh
    def make_table(run, self):
        if self._table is None:
            run(self)

    method(patch, DSparkDraft, "_make_table", make_table)
    patch.setattr(TokenTable, "is_stale", lambda self, *sources: False)


def rebound_table_after_refit(patch):
    def make_table(run, self):
        self._table = None
        run(self)

    method(patch, DSparkDraft, "_make_table", make_table)


def table_follows_the_draft_alone(patch):
    # a refit of the target's embedding alone: the hook sees an unchanged projection and does nothing
    def hook(run, self):
        if self._broadcast is None or self._broadcast.is_stale():
            run(self)

    method(patch, DSparkDraft, "process_weights_after_loading", hook)
    patch.setattr(TokenTable, "is_stale", lambda self, *sources: False)


def no_table_after_dummy_load(patch):
    # made where weights are loaded and embeddings bound, not in the hook
    def hook(run, self):
        make, self._make_table = self._make_table, lambda: None
        try:
            run(self)
        finally:
            self._make_table = make

    method(patch, DSparkDraft, "process_weights_after_loading", hook)


# ---- drafting ----


def one_position_early(patch):
    def block(run, self, anchors, start, size=None):
        return run(self, anchors, start - 1, size)

    method(patch, DSparkDraft, "block", block)


def markov_row_of_the_next_base_row(patch):
    def propose(run, draft, output, *args):
        return run(draft, output._replace(logits=output.logits.roll(-1, 1)), *args)

    wrap(patch, mhc.dspark.rounds, "propose", propose)


def markov_of_the_anchor_alone(patch):
    def propose(run, draft, output, anchors, *args):
        embed = draft.markov_head.embed
        draft.markov_head.embed = lambda previous: embed(anchors)
        try:
            return run(draft, output, anchors, *args)
        finally:
            del draft.markov_head.embed

    wrap(patch, mhc.dspark.rounds, "propose", propose)


def causal_inside_the_block(patch):
    def attend(run, queries, keys, mask, sink, own=None):
        if own is None:
            return run(queries, keys, mask, sink)
        rows = own.shape[2]
        visible = torch.ones(rows, rows, dtype=torch.bool).tril().expand(mask.shape[0], -1, -1)
        return run(queries, torch.cat((keys, own[:, 0]), 1), torch.cat((mask, visible), -1), sink)

    wrap(patch, mhc.dspark.attention, "attend", attend)


def compressed_layers_theta(patch):
    for module in (mhc.dspark.target, mhc.dspark.draft):
        wrap(patch, module, "angles", lambda run, positions, width, theta: run(positions, width, 160000.0))


def noise_is_padding(patch):
    def block(run, self, *args):
        token_ids, positions = run(self, *args)
        return token_ids.where(token_ids != self.config.noise_token_id, self.config.pad_token_id), positions

    method(patch, DSparkDraft, "block", block)


def context_missing_on_a_prefix_hit(patch):
    patch.setattr(Caches, "copy_prefix", lambda self, prefix, length: self.target.copy_prefix(prefix.target, length))


def rejected_rows_shift_the_context(patch):
    # rows are inserted one behind the other, as if every drafted row had been accepted
    def insert(run, self, context, aux, positions, valid=None):
        return run(self, context, aux, (positions + 1).clamp(max=context.capacity - 1), valid)

    method(patch, DSparkDraft, "insert_context", insert)


def aux_layer_off_by_one(patch):
    def run_blocks(run, blocks, first, attend, config, keep=()):
        return run(blocks, first, attend, config, [layer - 1 for layer in keep])

    wrap(patch, mhc.dspark.target, "run_blocks", run_blocks)


# ---- sampling and verification ----


def draft_at_another_temperature(patch):
    wrap(patch, mhc.dspark.rounds, "propose", lambda run, d, o, a, temperature, u: run(d, o, a, 1.0, u))


def q_before_the_markov_correction(patch):
    def propose(run, draft, output, anchors, temperature, uniform):
        proposal = run(draft, output, anchors, temperature, uniform)
        return proposal._replace(probabilities=torch.softmax(output.logits / temperature, -1))

    wrap(patch, mhc.dspark.rounds, "propose", propose)


def q_at_another_temperature(patch):
    def propose(run, draft, output, anchors, temperature, uniform):
        proposal = run(draft, output, anchors, temperature, uniform)
        flat = proposal.probabilities.sqrt()
        return proposal._replace(probabilities=flat / flat.sum(-1, keepdim=True))

    wrap(patch, mhc.dspark.rounds, "propose", propose)


def draft_shares_the_acceptance_stream(patch):
    def uniform(run, seed, streams, *args):
        return run(seed, [Stream.ACCEPT if stream == Stream.DRAFT else stream for stream in streams], *args)

    wrap(patch, mhc.dspark.rounds, "uniform", uniform)


def draft_shares_the_target_stream(patch):
    def uniform(run, seed, streams, *args):
        return run(seed, [Stream.TARGET if stream == Stream.DRAFT else stream for stream in streams], *args)

    wrap(patch, mhc.dspark.rounds, "uniform", uniform)


def noise_depends_on_the_place_in_the_batch(patch):
    def uniform(run, seed, streams, requests, positions):
        return run(seed, streams, torch.arange(len(requests)).unsqueeze(1), positions)

    wrap(patch, mhc.dspark.rounds, "uniform", uniform)


def cut_after_verification(patch):
    def verify(run, logits, proposal, length, temperature, accept, emit):
        """All k tokens are judged, then those behind the cut are dropped and a token is drawn in their place."""
        full = run(logits, proposal, torch.full_like(length, proposal.tokens.shape[1]), temperature, accept, emit)
        cut = full.accepted > length
        row = torch.softmax(logits / temperature, -1).gather(1, length.view(-1, 1, 1).expand(-1, 1, logits.shape[-1]))
        drawn = mhc.dspark.rounds.pick(row.squeeze(1), emit.gather(1, length.unsqueeze(1)).squeeze(1))
        tokens = full.tokens.scatter(1, length.unsqueeze(1), drawn.unsqueeze(1))
        return Verdict(torch.where(cut.unsqueeze(1), tokens, full.tokens), torch.minimum(full.accepted, length))

    wrap(patch, mhc.dspark.rounds, "verify", verify)


def residual_of_the_target_itself(patch):
    wrap(
        patch, mhc.dspark.verification, "_emission", lambda run, p, q, accepted, length: run(p, q * 0, accepted, length)
    )


# ---- counts and padding ----


def length_without_the_bonus(patch):
    patch.setattr(mhc.gsm8k.stats.Acceptance, "mean_length", property(lambda self: self.accepted / self.drafts))


def tokens_behind_the_end(patch):
    def emit(run, self, tokens, number):
        # the end is noticed, but only after the whole block was written
        eos, self.eos = self.eos, -1
        kept = run(self, tokens, number)
        self.eos = eos
        self.ended |= (kept & (tokens == eos)).any(-1)
        self.live &= ~self.ended
        return kept

    method(patch, Batch, "emit", emit)


def padding_taken_for_prompt(patch):
    def prefill(run, target, draft, prompts, prefix, room):
        longest = max(len(prompt) for prompt in prompts)
        padded = [[*prompt, *[target.config.pad_token_id] * (longest - len(prompt))] for prompt in prompts]
        caches, logits, _ = run(target, draft, padded, prefix, room)
        lengths = torch.tensor([len(prefix) + len(prompt) for prompt in prompts])
        return caches, logits, lengths

    wrap(patch, mhc.dspark.decode, "prefill", prefill)


def padded_rows_are_kept(patch):
    # the bin is forgotten: rows that are not valid go to position 0, as vLLM's rejected suffix rows would
    def write(run, self, layer, latents, positions, valid=None):
        return run(self, layer, latents, positions if valid is None else positions.where(valid, 0), None)

    method(patch, mhc.dspark.cache.LatentCache, "write", write)


def dropped_by_a_name_map(patch):
    # "w1" of the shared expert is swallowed by the rule for "markov_w1", and no name check notices
    def names(run, draft):
        return {name: tensor for name, tensor in run(draft).items() if ".shared_experts.w1" not in name}

    wrap(patch, mhc.dspark.checkpoint, "checkpoint_tensors", names)
    patch.setattr(Checkpoint, "require", lambda self, wanted, within: None)
