"""What options of other libraries are called here: errors about unknown options say it."""

import dataclasses
import functools
import inspect
from collections.abc import Iterable
from typing import Any

from statetrack.errors import UserError, unknown_name

RANGE = 'eigenvalues="[-1,1]" for True, eigenvalues="[0,1]" for False'
CHOSEN = "nothing to set: kernels are chosen by the device (STATETRACK_BACKEND names another)"

# name: (the library it comes from, what to write here)
PEER_OPTIONS: dict[str, tuple[str, str]] = {
    "allow_neg_eigval": ("fla", RANGE),
    "linear_allow_neg_eigval": ("transformers", RANGE),
    "num_heads": ("fla", "heads"),
    "num_attention_heads": ("transformers", "heads"),
    "n_heads": ("other libraries", "heads"),
    "num_v_heads": ("fla", "value_heads, with a DeltaNet mixer"),
    "linear_num_value_heads": ("transformers", "value_heads, with a DeltaNet mixer"),
    "linear_num_key_heads": ("transformers", "heads"),
    "linear_key_head_dim": ("transformers", "head_dim"),
    "linear_value_head_dim": ("transformers", "value_dim"),
    "expand_k": ("fla", "head_dim, the width of one key: expand_k * d_model / heads"),
    "expand_v": (
        "fla",
        "value_dim, the width of one value: in fla's DeltaNet expand_v * d_model / heads, in "
        "its GatedDeltaNet expand_v * head_dim",
    ),
    "use_short_conv": ("fla", "convolution, its width: convolution=0 for none"),
    "conv_size": ("fla", "convolution"),
    "d_conv": ("mamba-ssm", "convolution"),
    "conv_kernel": ("transformers", "convolution"),
    "linear_conv_kernel_dim": ("transformers", "convolution"),
    "conv_bias": ("fla and mamba-ssm", "conv_bias, with a DeltaNet or a Mamba mixer"),
    "use_conv_bias": ("transformers", "conv_bias"),
    "output_gate_activation": ("fla", 'gate_activation, "silu" for "swish", or "sigmoid"'),
    "use_gate": ("fla", "output_gate"),
    "use_forget_gate": ("fla", "gated"),
    "num_householder": ("fla", "householders"),
    "use_beta": (
        "fla",
        "nothing to set: layers always compute beta; without it, call "
        "statetrack.compat.fla.fused_recurrent_delta_rule",
    ),
    "qk_norm": ("fla", "nothing to set: q and k are divided by their L2 norms"),
    "d_state": ("mamba-ssm", "d_state with a Mamba mixer; the state of a DeltaNet is head_dim by value_dim"),
    "state_size": ("transformers", "d_state, with a Mamba mixer"),
    "expand": ("mamba-ssm", "expand with a Mamba mixer; in a DeltaNet head_dim and value_dim set the widths"),
    "dt_rank": ("mamba-ssm", "dt_rank, with a Mamba mixer"),
    "time_step_rank": ("transformers", "dt_rank, with a Mamba mixer"),
    "dt_min": ("mamba-ssm", "dt_min, with a Mamba mixer"),
    "dt_max": ("mamba-ssm", "dt_max, with a Mamba mixer"),
    "dt_init": ("mamba-ssm", "dt_init, with a Mamba mixer"),
    "dt_scale": ("mamba-ssm", "dt_scale, with a Mamba mixer"),
    "dt_init_floor": ("mamba-ssm", "dt_init_floor, with a Mamba mixer"),
    "time_step_min": ("transformers", "dt_min"),
    "time_step_max": ("transformers", "dt_max"),
    "time_step_init_scheme": ("transformers", "dt_init"),
    "time_step_scale": ("transformers", "dt_scale"),
    "time_step_floor": ("transformers", "dt_init_floor"),
    "bias": ("mamba-ssm", "bias, with a Mamba mixer"),
    "use_bias": ("transformers", "bias, with a Mamba mixer"),
    "headdim": ("mamba-ssm", "heads, with a Mamba-2 or Mamba-3 mixer: expand * d_model / headdim of them"),
    "ngroups": ("mamba-ssm", "groups, with a Mamba-2 or Mamba-3 mixer"),
    "n_groups": ("transformers", "groups, with a Mamba-2 or Mamba-3 mixer"),
    "rope_fraction": ("mamba-ssm", "rotated, with a Mamba-3 mixer"),
    "chunk_size": ("mamba-ssm and transformers", CHOSEN),
    "gate_low_rank_dim": ("fla", "gate_rank, with a GLA mixer"),
    "gate_logit_normalizer": ("fla", "nothing to set: GLA has 16 in [0,1], and 1 in [-1,1]"),
    "gate_fn": ("fla", 'gate_activation, "silu" for "swish", or "sigmoid"; the gate of GLA is a silu'),
    "expand_ratio": ("fla", "heads, with an HGRN2 mixer: d_model / expand_ratio of them"),
    "embedding_dim": ("xlstm", "d_model"),
    "num_blocks": ("xlstm", "layers"),
    "conv1d_kernel_size": ("xlstm", "convolution"),
    "qkv_proj_blocksize": ("xlstm", "qkv_block, with an mLSTM mixer"),
    "context_length": ("xlstm", "nothing to set: there is no largest length"),
    "slstm_at": ("xlstm", "mixers, a pattern of MLSTMConfig() and SLSTMConfig()"),
    "hidden_size": ("fla and transformers", "d_model"),
    "num_hidden_layers": ("fla and transformers", "layers"),
    "num_layers": ("other libraries", "layers"),
    "n_layer": ("mamba-ssm", "layers"),
    "hidden_ratio": ("fla", "mlp_ratio"),
    "intermediate_size": ("fla and transformers", "mlp_ratio, the width of the MLP divided by d_model"),
    "d_intermediate": ("mamba-ssm", "mlp_ratio, the width of the MLP divided by d_model"),
    "norm_eps": (
        "fla",
        "norm_eps of the model, head_norm_eps of a DeltaNet mixer, output_norm_eps of Mamba-2 and HGRN2",
    ),
    "rms_norm": ("mamba-ssm", 'norm="rms" for True, norm="layer" for False'),
    "rms_norm_eps": ("transformers", "norm_eps"),
    "layer_norm_epsilon": ("transformers", "norm_eps"),
    "residual_in_fp32": ("mamba-ssm", "half_stream=False for True (the default), half_stream=True for False"),
    "tie_word_embeddings": ("fla and transformers", "tied"),
    "tie_embeddings": ("mamba-ssm", "tied"),
    "attn": ("fla", "attention_every, or mixers for a pattern of your own"),
    "attn_layer_idx": ("mamba-ssm", "attention_every, or mixers for a pattern of your own"),
    "layer_types": ("transformers", "attention_every, or mixers for a pattern of your own"),
    "num_kv_heads": ("fla", "kv_heads, with attention"),
    "num_key_value_heads": ("transformers", "kv_heads, with attention"),
    "rope_theta": ("fla and transformers", "rotary_base, with attention"),
    "window_size": ("fla", "window, with attention"),
    "sliding_window": ("transformers", "window, with attention"),
    "qkv_bias": ("fla", "qkv_bias, with attention"),
    "vocab_size": ("other libraries", "the argument vocab_size of build() and of Model()"),
    "max_position_embeddings": ("fla and transformers", "nothing to set: there is no largest length"),
    "layer_idx": ("fla and mamba-ssm", "nothing to set: the state is an argument and a result of the model"),
    "mode": ("fla", CHOSEN),
    "attn_mode": ("fla", CHOSEN),
    "use_fast_path": ("mamba-ssm", CHOSEN),
    "fused_add_norm": ("mamba-ssm", CHOSEN),
    "fuse_norm": ("fla", CHOSEN),
    "fuse_swiglu": ("fla", CHOSEN),
    "fuse_cross_entropy": ("fla", CHOSEN),
    "learning_rate": ("transformers", "lr"),
    "max_steps": ("transformers", "steps"),
    "batch_size": ("other libraries", "batch"),
    "per_device_train_batch_size": ("transformers", "batch, over all devices together"),
    "warmup_steps": ("transformers", "warmup, the fraction of the steps"),
    "max_grad_norm": ("transformers", "clip"),
    "lr_scheduler_type": ("transformers", "schedule"),
}


class UnknownOption(UserError, TypeError):
    """An option that does not exist, given to a config, a function or a command; also a `TypeError`."""


def unknown_option(where: str, name: str, known: Iterable[str], of: str = "") -> UnknownOption:
    """The error for an option that does not exist: what to write instead, if another library has it.

    deltanet: option 'num_heads' is not known; it comes from fla. Here: heads. More: docs/porting.md

    `of` is what has the options in `known`, where that is not `where`.
    """
    known = list(known)
    if name not in PEER_OPTIONS:
        return UnknownOption(str(unknown_name(f"{where}: option", name, known)))
    library, ours = PEER_OPTIONS[name]
    if ours.isidentifier() and ours not in known:
        ours = f"{ours}, though not in {of or where}"
    return UnknownOption(
        f"{where}: option {name!r} is not known; it comes from {library}. Here: {ours}. More: docs/porting.md"
    )


def explain_unknown_options(cls: type) -> None:
    """Let the constructor of a dataclass answer an unknown option with `unknown_option`."""
    made: Any = vars(cls).get("__init__")
    if not inspect.isfunction(made) or hasattr(made, "__wrapped__"):
        return
    known = [name for name in inspect.signature(made).parameters if name != "self"]

    @functools.wraps(made)
    def init(self: Any, *values: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise unknown_option(cls.__name__, name, known)
        made(self, *values, **options)

    cls.__init__ = init  # type: ignore[misc]


def explain_layer(cls: type) -> None:
    """Let the constructor of a layer, (config, d_model), answer options given to it instead of its config."""
    made: Any = vars(cls).get("__init__")
    if not inspect.isfunction(made):
        return
    parameters = inspect.signature(made).parameters
    known = list(parameters)[1:]
    if known[:2] != ["config", "d_model"]:
        return
    Config, name = parameters["config"].annotation, cls.__name__

    @functools.wraps(made)
    def init(self: Any, *values: Any, **options: Any) -> None:
        of_config = [option for option in options if option not in known]
        given = dict(zip(known, values, strict=False)) | options
        if not of_config and isinstance(given.get("config"), Config) and "d_model" in given:
            return made(self, *values, **options)
        fields = [field.name for field in dataclasses.fields(Config)]
        shown = ", ".join(f"{option}=..." for option in of_config if option in fields)
        expected = f"expected {name}({Config.__name__}({shown}), d_model=64)."
        for option in of_config:
            if option not in fields:
                error = str(unknown_option(name, option, [*known, *fields])).rstrip(".")
                raise UnknownOption(f"{error}. The constructor: {expected.removeprefix('expected ')}")
        if of_config:
            raise UnknownOption(f"{name}: {of_config[0]!r} is an option of its config, {expected}")
        if "config" not in given or "d_model" not in given:
            missing = "config" if "config" not in given else "d_model"
            raise UnknownOption(f"{name}: {missing} is missing, {expected}")
        raise UnknownOption(f"{name}: config is a {type(given['config']).__name__}, {expected}")

    cls.__init__ = init  # type: ignore[misc]
