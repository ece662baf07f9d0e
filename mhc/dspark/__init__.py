"""DSpark on DeepSeek-V4's block: draft model, miniature target, exact speculative decoding."""

from mhc.dspark.anchored import AnchoredOutput, anchored_forward
from mhc.dspark.batch import Completion, Round
from mhc.dspark.cache import LatentCache
from mhc.dspark.config import V4Config
from mhc.dspark.decode import generate
from mhc.dspark.draft import DraftOutput, DSparkDraft
from mhc.dspark.initialise import initialise, to_inference
from mhc.dspark.target import SharedEmbeddings, Target, TargetOutput

__all__ = [
    "AnchoredOutput",
    "Completion",
    "DSparkDraft",
    "DraftOutput",
    "LatentCache",
    "Round",
    "SharedEmbeddings",
    "Target",
    "TargetOutput",
    "V4Config",
    "anchored_forward",
    "generate",
    "initialise",
    "to_inference",
]
