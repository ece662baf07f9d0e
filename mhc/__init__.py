"""DeepSeek-V4's first mHC layer without the repeated embeddings: maths, derived weights, kernels, DSpark."""

from mhc import reference
from mhc.checkpoint import load_mhc_tensors
from mhc.config import MHCConfig
from mhc.ops import PreOutput, head, post, post_pre, pre, pre_broadcast
from mhc.weights import BroadcastWeight, fold

__all__ = [
    "BroadcastWeight",
    "MHCConfig",
    "PreOutput",
    "fold",
    "head",
    "load_mhc_tensors",
    "post",
    "post_pre",
    "pre",
    "pre_broadcast",
    "reference",
]
