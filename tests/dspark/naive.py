"""The draft from the specification, one request, fp64, loops: what the batched code is held against."""

import torch

from mhc import reference

WIDE = torch.float64


def norm(x, weight=None, eps=1e-6):
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rope(x, position, width, inverse=False, theta=10000.0):
    """Interleaved pairs of the last `width` entries, one row at a time, as complex numbers."""
    x = x.clone()
    rate = theta ** (-torch.arange(0, width, 2, dtype=WIDE) / width)
    turn = torch.polar(torch.ones_like(rate), (-rate if inverse else rate) * position)
    pairs = torch.view_as_complex(x[..., -width:].contiguous().unflatten(-1, (-1, 2)))
    x[..., -width:] = torch.view_as_real(pairs * turn).flatten(-2)
    return x


class NaiveDraft:
    """Follows specs: context, block, heads."""

    def __init__(self, draft):
        self.config = draft.config
        self.w = {name: tensor.detach().to(WIDE) for name, tensor in draft.state_dict().items()}
        self.embed = draft.shared.embed.weight.detach().to(WIDE)
        self.head = draft.shared.head.weight.detach().to(WIDE)

    def latent(self, layer, row, position):
        w = lambda name: self.w[f"layers.{layer}.attn.{name}"]  # noqa: E731
        kv = norm(w("wkv.weight") @ row, w("kv_norm.weight"))
        return rope(kv, position, self.config.rope_dim)

    def attention(self, layer, row, position, keys):
        c = self.config
        w = lambda name: self.w[f"layers.{layer}.attn.{name}"]  # noqa: E731
        q = (w("wq_b.weight") @ norm(w("wq_a.weight") @ row, w("q_norm.weight"))).view(c.num_heads, c.head_dim)
        out = []
        for head in range(c.num_heads):
            query = rope(norm(q[head]), position, c.rope_dim)
            weights = torch.stack([key @ query for key in keys]) * c.head_dim**-0.5
            weights = torch.softmax(torch.cat((weights, w("attn_sink")[head : head + 1])), 0)[:-1]
            out.append(rope(sum(a * key for a, key in zip(weights, keys, strict=True)), position, c.rope_dim, True))
        groups = torch.cat(out).view(c.o_groups, -1)
        low = w("wo_a.weight").view(c.o_groups, c.o_lora_rank, -1)
        return w("wo_b.weight") @ torch.cat([low[g] @ groups[g] for g in range(c.o_groups)])

    def ffn(self, layer, row):
        w = lambda name: self.w[f"layers.{layer}.ffn.{name}.weight"]  # noqa: E731
        gate, up = w("w1") @ row, w("w3") @ row
        return w("w2") @ (torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10))

    def pre(self, layer, part, streams):
        w = lambda name: self.w[f"layers.{layer}.{name}"]  # noqa: E731
        weights = (w(f"hc_{part}_{piece}") for piece in ("fn", "scale", "base"))
        _, post, comb, y = reference.pre(streams, *weights, None, self.config.mhc)
        return post, comb, norm(y, w(f"{part}_norm.weight"))

    def hidden(self, anchor, start, aux, size):
        """Rows [k, H] before the final norm; `aux` [C, m * H] are the states at positions 0 .. start - 1."""
        c = self.config
        ids = [anchor] + [c.noise_token_id] * (size - 1)
        context = [norm(self.w["main_proj.weight"] @ row, self.w["main_norm.weight"]) for row in aux.to(WIDE)]
        streams = torch.stack([self.embed[token].expand(c.mhc.hc_mult, -1) for token in ids])
        for layer in range(c.draft_layers):
            post, comb, x = self.pre(layer, "attn", streams)
            seen = range(max(0, start - c.sliding_window), start)
            keys = [self.latent(layer, context[position], position) for position in seen]
            keys += [self.latent(layer, x[row], start + row) for row in range(size)]
            out = torch.stack([self.attention(layer, x[row], start + row, keys) for row in range(size)])
            streams = reference.post(out, streams, post, comb)
            post, comb, x = self.pre(layer, "ffn", streams)
            streams = reference.post(torch.stack([self.ffn(layer, row) for row in x]), streams, post, comb)
        return reference.head(streams, *(self.w[f"hc_head_{piece}"] for piece in ("fn", "scale", "base")), c.mhc)

    def corrected(self, hidden, anchor, tokens):
        """Logits [k, V] of each row, given the token before it, and the confidences [k]."""
        logits, confidence = [], []
        for row, previous in enumerate([anchor, *tokens[:-1]]):
            e = self.w["markov_head.markov_w1.weight"][previous]
            base = self.head @ norm(hidden[row], self.w["norm.weight"])
            logits.append(base + self.w["markov_head.markov_w2.weight"] @ e)
            confidence.append(torch.sigmoid(self.w["confidence_head.proj.weight"][0] @ torch.cat((hidden[row], e))))
        return torch.stack(logits), torch.stack(confidence)
