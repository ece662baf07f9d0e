"""A small byte-level BPE tokenizer for GSM8K text, trained on its train split alone.

Digits are tokens of their own, so that numbers a model never saw are still spelled from ten symbols; bytes are the
fallback, so that every text encodes and decodes to itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# the noise token has an id of its own: a draft that read padding as noise, or noise as padding, would be wrong
BOS, EOS, PAD, NOISE = "<|begin|>", "<|end|>", "<|pad|>", "<|noise|>"
BOS_ID, EOS_ID, PAD_ID, NOISE_ID = range(4)
VOCAB_SIZE = 2048


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train byte-level BPE.

    Args:
        texts: the training corpus.
        vocab_size: entries in all, special tokens included; at least 260 (4 special tokens and the bytes).

    Raises:
        ValueError: `vocab_size` is below 260, or the corpus is too small to reach it.
    """
    if vocab_size < 260:
        raise ValueError(f"vocab_size must be at least 260 (4 special tokens and 256 bytes), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD, NOISE],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size {vocab_size} is beyond this corpus, which yields {tokenizer.get_vocab_size()}")
    return tokenizer


def load(path: str | Path) -> Tokenizer:
    """Read a saved tokenizer.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its special tokens are not this project's.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no tokenizer at {path}: `python -m mhc train target` makes one")
    tokenizer = Tokenizer.from_file(str(path))
    if [tokenizer.token_to_id(name) for name in (BOS, EOS, PAD, NOISE)] != [BOS_ID, EOS_ID, PAD_ID, NOISE_ID]:
        raise ValueError(f"{path} must give {BOS}, {EOS}, {PAD} and {NOISE} the ids 0 to 3")
    return tokenizer
