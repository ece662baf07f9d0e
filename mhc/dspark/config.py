"""The shapes of a DeepSeek-V4 target and its DSpark draft, one frozen object for both."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mhc.config import MHCConfig

FFN_KINDS = ("moe", "dense")


@dataclass(frozen=True)
class V4Config:
    """Shapes and constants of a DeepSeek-V4 model and its DSpark draft.

    Letters: `V` vocabulary, `H` hidden, `D` head_dim, `h` heads, `k` block size, `m` aux layers.

    Args:
        vocab_size: `V`.
        hidden_size: `H`, a multiple of 64.
        num_layers: blocks of the target.
        num_heads, head_dim, rope_dim: `h` query heads of width `D`, of which the last `rope_dim` are rotated.
        q_lora_rank: rank of the query projection.
        o_lora_rank, o_groups: the grouped output projection: `o_groups` groups of heads, each to `o_lora_rank`.
        sliding_window: keys a query sees, itself included (target), and context rows a block sees (draft).
        rope_theta: base of the plain RoPE of window layers.
        ffn: `moe` or `dense` (a single SwiGLU of width `ffn_width`).
        ffn_width: width of one expert, of the shared expert, or of the dense SwiGLU.
        num_experts, experts_per_token: routed experts and how many of them a token takes (`moe` only).
        routed_scaling: factor of the normalised routing weights.
        swiglu_limit: the gate is clamped from above and the up projection on both sides to this value.
        draft_layers: blocks of the draft.
        block_size: `k`, tokens drafted a round.
        noise_token_id: what fills a block behind its anchor; never the padding token.
        aux_layers: target blocks whose outputs (mean over streams) condition the draft, increasing.
        markov_rank: `r`.
        eos_token_id, pad_token_id: end of a sequence, and the filler of ragged batches.
        mhc: the hyper-connection's constants; its `hidden_size` must be `hidden_size`.

    Raises:
        ValueError: naming the argument, its value and what is accepted.

    Source: DeepSeek-V4-Flash's published configuration and DSpark keys.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    ffn: str
    ffn_width: int
    noise_token_id: int
    aux_layers: tuple[int, ...]
    markov_rank: int
    mhc: MHCConfig
    sliding_window: int = 128
    rope_theta: float = 10000.0
    num_experts: int = 0
    experts_per_token: int = 0
    routed_scaling: float = 1.5
    swiglu_limit: float = 10.0
    draft_layers: int = 3
    block_size: int = 7
    eos_token_id: int = 1
    pad_token_id: int = 2

    def __post_init__(self) -> None:
        optional = {"num_experts", "experts_per_token", "eos_token_id", "pad_token_id", "noise_token_id"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{field.name} must be an int, got {value!r}")
            if field.type == "int" and value < (0 if field.name in optional else 1):
                raise ValueError(f"{field.name} must be positive, got {value}")
        self._check_attention()
        self._check_ffn()
        self._check_draft()

    def _check_attention(self) -> None:
        if self.mhc.hidden_size != self.hidden_size:
            raise ValueError(f"mhc.hidden_size must be hidden_size={self.hidden_size}, got {self.mhc.hidden_size}")
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ValueError(f"rope_dim must be even and at most head_dim={self.head_dim}, got {self.rope_dim}")
        if self.num_heads % self.o_groups:
            raise ValueError(f"o_groups must divide num_heads={self.num_heads}, got {self.o_groups}")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 1):
            raise ValueError(f"rope_theta must be finite and > 1, got {self.rope_theta}")

    def _check_ffn(self) -> None:
        if self.ffn not in FFN_KINDS:
            raise ValueError(f"ffn must be one of {', '.join(FFN_KINDS)}, got {self.ffn!r}")
        if self.ffn == "moe" and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token must be 1 to num_experts={self.num_experts}, got {self.experts_per_token}"
            )

    def _check_draft(self) -> None:
        layers = self.aux_layers
        if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < self.num_layers:
            raise ValueError(f"aux_layers must increase within 0 to {self.num_layers - 1}, got {layers}")
        for name in ("noise_token_id", "eos_token_id", "pad_token_id"):
            if getattr(self, name) >= self.vocab_size:
                raise ValueError(f"{name} must be below vocab_size={self.vocab_size}, got {getattr(self, name)}")
        if self.noise_token_id == self.pad_token_id:
            raise ValueError(f"noise_token_id must differ from pad_token_id, both are {self.noise_token_id}")

    @classmethod
    def tiny(cls, ffn: str = "moe", vocab_size: int = 32) -> V4Config:
        """A few thousand parameters: for tests."""
        return cls(
            vocab_size=vocab_size,
            hidden_size=64,
            num_layers=4,
            num_heads=4,
            head_dim=16,
            rope_dim=8,
            q_lora_rank=24,
            o_lora_rank=12,
            o_groups=2,
            ffn=ffn,
            ffn_width=32,
            num_experts=4,
            experts_per_token=2,
            noise_token_id=3,
            aux_layers=(1, 2, 3),
            markov_rank=8,
            sliding_window=16,
            draft_layers=2,
            block_size=4,
            mhc=MHCConfig(hidden_size=64),
        )

    @classmethod
    def mini(cls) -> V4Config:
        """The pair trained in this repository: about 8 M parameters, target, draft and embeddings together.

        Four blocks, because the draft has three: it cannot foresee what a deeper target of this width would make of a
        token. Token ids 0 to 3 are begin, end, padding and noise.
        """
        return cls(
            vocab_size=2048,
            hidden_size=256,
            num_layers=4,
            num_heads=8,
            head_dim=64,
            rope_dim=32,
            q_lora_rank=128,
            o_lora_rank=64,
            o_groups=4,
            ffn="dense",
            ffn_width=768,
            noise_token_id=3,
            aux_layers=(1, 2, 3),
            markov_rank=128,
            mhc=MHCConfig.mini(),
        )

    @classmethod
    def v4_flash(cls) -> V4Config:
        """DeepSeek-V4-Flash with its DSpark draft: 19.4 B parameters in the draft's three blocks.

        The checkpoint's block size is 5; vLLM's tests run 7.
        """
        return cls(
            vocab_size=129280,
            hidden_size=4096,
            num_layers=43,
            num_heads=64,
            head_dim=512,
            rope_dim=64,
            q_lora_rank=1024,
            o_lora_rank=1024,
            o_groups=8,
            ffn="moe",
            ffn_width=2048,
            num_experts=256,
            experts_per_token=6,
            noise_token_id=128799,
            aux_layers=(40, 41, 42),
            markov_rank=256,
            block_size=5,
            mhc=MHCConfig.v4_flash(),
        )
