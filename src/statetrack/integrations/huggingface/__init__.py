"""Models of this library in Hugging Face transformers.

    import statetrack.integrations.huggingface
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.generate(tokens, num_beams=4)

The import registers the classes below with AutoConfig and AutoModelForCausalLM.
"""

from statetrack.errors import require

require("transformers", extra="hf", for_="a model in Hugging Face format")

# below the line that says what is missing
from statetrack.integrations.huggingface.cache import StateCache  # noqa: E402
from statetrack.integrations.huggingface.configuration import StateTrackConfig  # noqa: E402
from statetrack.integrations.huggingface.modeling import StateTrackForCausalLM  # noqa: E402

__all__ = ["StateCache", "StateTrackConfig", "StateTrackForCausalLM", "register"]


def register() -> None:
    """Tell AutoConfig and AutoModelForCausalLM of these classes. Importing this package does it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoConfig.register(StateTrackConfig.model_type, StateTrackConfig, exist_ok=True)
    AutoModelForCausalLM.register(StateTrackConfig, StateTrackForCausalLM, exist_ok=True)


register()
