"""Our tokenizers as those of transformers, with the same ids."""

from typing import Any

from statetrack.errors import require
from statetrack.lm.tokenizers import Tokenizer


def fast_tokenizer(tokenizer: Tokenizer) -> Any:
    """A `PreTrainedTokenizerFast` with the ids of `tokenizer`, whose end-of-document token it calls eos.

    That token also starts a text that has no context, and fills up rows. As in our own, special tokens in a
    text are encoded as the text they are.
    """
    transformers = require("transformers", extra="hf", for_="a tokenizer in Hugging Face format")
    tokenizers = require("tokenizers", extra="hf", for_="a tokenizer in Hugging Face format")
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    end = inner.id_to_token(tokenizer.end_of_document)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
