"""The values in a config.json that layers are made of: numbers where numbers belong, before they are used."""

from collections.abc import Mapping
from typing import Any

from statetrack.errors import UserError

# of all families; those that are None by default or on purpose are listed in OPTIONAL as well
WHOLE = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "intermediate_size",
    "head_dim",
    "num_heads",
    "num_v_heads",
    "conv_size",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "state_size",
    "expand",
    "conv_kernel",
    "time_step_rank",
)
NUMBERS = ("expand_k", "expand_v", "hidden_ratio", "norm_eps", "rms_norm_eps", "layer_norm_epsilon")
OPTIONAL = ("intermediate_size", "num_v_heads", "hidden_ratio", "num_kv_heads", "window_size", "rope_theta")


def check_settings(where: str, settings: Mapping[str, Any]) -> None:
    """Refuse sizes that are no whole numbers of at least 1, and other values of the wrong kind, by name."""
    optional = OPTIONAL if "num_heads" in settings else (*OPTIONAL, "head_dim")  # theirs of attention
    _check_numbers(where, settings, WHOLE, NUMBERS, optional)
    _check_numbers(where, settings.get("rope_parameters") or {}, (), ("rope_theta",), OPTIONAL)
    attn = settings.get("attn")
    for spec in attn if isinstance(attn, list) else [attn] if attn else []:
        _check_attention(where, spec, settings["num_hidden_layers"])


def _check_numbers(
    where: str, settings: Any, whole: tuple[str, ...], numbers: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    if not isinstance(settings, Mapping):
        raise UserError(f"{where}: {settings!r} stands where a table of settings is expected.")
    for name in (*whole, *numbers):
        value = settings.get(name)
        if name not in settings or (value is None and name in optional):
            continue
        kinds = (int,) if name in whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
            expected = "a whole number of at least 1" if name in whole else "a number above 0"
            raise UserError(f"{where}: {name} is {value!r}, expected {expected}.")


def _check_attention(where: str, spec: Any, layers: int) -> None:
    """The specification of attention layers in a model of fla."""
    where = f"{where}: attn"
    _check_numbers(where, spec, ("num_heads", "num_kv_heads", "window_size"), ("rope_theta",), OPTIONAL)
    places = spec.get("layers")
    if "num_heads" not in spec or not isinstance(places, list):
        raise UserError(f"{where} is {spec!r}, expected num_heads and layers, a list of layers.")
    for place in places:
        if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < layers:
            raise UserError(f"{where}: layers has {place!r}, expected numbers from 0 to {layers - 1}.")
