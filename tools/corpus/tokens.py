"""The tokenizer of the corpus: byte-level BPE with single digits, the same in every training."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

END = "<|endoftext|>"
SAMPLE = 4  # one document in four trains the tokenizer
BATCH = 512  # documents encoded at a time


def train_tokenizer(texts: Iterable[str], vocabulary: int, path: Path) -> None:
    """Write a BPE of `vocabulary` tokens to a file of the `tokenizers` library; token 0 ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.write_text(tokenizer.to_str(pretty=False))


def encode(texts: list[str], path: Path) -> Iterator[np.ndarray]:
    """Token ids of every text with the end-of-document token behind them, uint16."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True  # the characters of END inside a text are ordinary characters
    end = tokenizer.token_to_id(END)
    for first in range(0, len(texts), BATCH):
        for encoded in tokenizer.encode_batch_fast(texts[first : first + BATCH], add_special_tokens=False):
            yield np.array([*encoded.ids, end], dtype=np.uint16)
