"""A DeepSeek-V4-Flash with its DSpark draft in few layers of real shapes, for an engine that loads random weights.

Four target layers hold every kind of attention that V4 has (compress ratios 0, 4 and 128; vLLM's cache planning needs
one layer of each), three draft layers are the real number. 45.7 GiB of weights at one GPU. Experts are FP8.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET_LAYERS, DRAFT_LAYERS = 4, 3
REAL_TARGET_LAYERS = 43
SPECULATIVE_TOKENS = 7
BLOCK_SIZE = 256  # of the KV cache; vLLM refuses smaller ones for V4

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": TARGET_LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 1,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "compress_ratios": [0, 0, 4, 128],
    "compress_rope_theta": 160000.0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 1,
    "n_mtp_layers": DRAFT_LAYERS,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 128799,
    "expert_dtype": "fp8",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_cache": True,
    "initializer_range": 0.02,
}


def write(folder: Path) -> Path:
    """Write the model folder: a config.json alone, its weights are made when it is loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1), encoding="utf-8")
    return folder


def prompts(batch: int, length: int, seed: int) -> list[list[int]]:
    """`batch` prompts of `length` token ids each, all different, none a special token."""
    first, usable = 100, CONFIG["dspark_noise_token_id"] - 200
    return [[first + (seed + 377 * row + 1013 * col) % usable for col in range(length)] for row in range(batch)]
