"""DeepSeek-V4's first mHC layer without the repeated embeddings: maths, derived weights, kernels, DSpark."""

from mhc import reference
from mhc.checkpoint import load_mhc_tensors
from mhc.config import MHCConfig
from mhc.launch import warmup
from mhc.ops import CollapsedOutput, PreOutput, head, post, post_pre, pre, pre_broadcast
from mhc.table import TokenTable, pre_from_table, pre_noise_rows
from mhc.weights import BroadcastWeight, fold

__all__ = [
    "BroadcastWeight",
    "CollapsedOutput",
    "MHCConfig",
    "PreOutput",
    "TokenTable",
    "fold",
    "head",
    "load_mhc_tensors",
    "post",
    "post_pre",
    "pre",
    "pre_broadcast",
    "pre_from_table",
    "pre_noise_rows",
    "reference",
    "warmup",
]
