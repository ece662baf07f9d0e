"""The draft's two small heads: Markov (what follows the token before) and confidence (will it be accepted)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc.dspark.config import V4Config
from mhc.dspark.matmul import matmul_fp32


class MarkovHead(nn.Module):
    """`B = W2 W1[x]`: a rank-r bigram correction of the next token's logits, `W1` and `W2` [V, r].

    Source: the DSpark paper's vanilla Markov head.
    """

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """`W1[x]`. int64 [...] -> [..., r]."""
        return self.markov_w1(previous)

    def forward(self, embedded: Tensor) -> Tensor:
        """The correction of `embed`'s rows. [..., r] -> [..., V] fp32."""
        return matmul_fp32(embedded.flatten(0, -2), self.markov_w2.weight.T).unflatten(0, embedded.shape[:-1])


class ConfidenceHead(nn.Module):
    """`w . [h; W1[x]]` in fp32 without bias; its sigmoid is the predicted acceptance of the token drafted from `h`.

    Source: DeepSeek-V4's draft, which takes `h` before the final norm.
    """

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1, bias=False)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[..., H] and [..., r] -> logits [...] fp32."""
        features = torch.cat((hidden.to(torch.float32), embedded.to(torch.float32)), dim=-1)
        with torch.autocast(features.device.type, enabled=False):
            return F.linear(features, self.proj.weight.to(torch.float32)).squeeze(-1)
