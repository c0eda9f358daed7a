"""A trained run as a Hugging Face folder: `statetrack lm export RUN DIR`.

config.json, generation_config.json, model.safetensors      the model
modeling_statetrack.py                                      two lines that import its classes from here
tokenizer.json, tokenizer_config.json, ...                  the tokenizer, for AutoTokenizer
"""

from pathlib import Path

from statetrack.files import new_folder, write_text
from statetrack.integrations.huggingface.modeling import StateTrackForCausalLM
from statetrack.integrations.huggingface.tokenizer import fast_tokenizer
from statetrack.lm.models import OpenedModel
from statetrack.lm.tokenizers import FILE


def wrapped(opened: OpenedModel) -> StateTrackForCausalLM:
    """The opened model, not a copy, as a model of transformers that knows its end-of-document token."""
    end = opened.tokenizer.end_of_document
    return StateTrackForCausalLM.from_model(
        opened.model, context=opened.context, bos_token_id=end, eos_token_id=end, pad_token_id=end
    )


def export(opened: OpenedModel, folder: str | Path) -> Path:
    """Write the model and its tokenizer to `folder`, new or empty, which appears when complete."""
    with new_folder(folder) as partial:
        wrapped(opened).save_pretrained(partial)
        fast_tokenizer(opened.tokenizer).save_pretrained(partial)
        # the very file: its checksum says that data and model have one tokenizer
        write_text(partial / FILE, opened.tokenizer.to_json())
    return Path(folder)
