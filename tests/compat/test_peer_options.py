"""Options of fla, mamba-ssm and transformers are recognised wherever options are given."""

import inspect
import re

import pytest
import torch

import statetrack
from statetrack import (
    GLA,
    DeltaNet,
    DeltaNetConfig,
    GLAConfig,
    Mamba,
    Mamba2Config,
    MambaConfig,
    MLSTMConfig,
    ModelConfig,
    RunSpec,
    TrainingConfig,
    build,
    model_config,
    train,
)
from statetrack.cli import main
from statetrack.errors import UserError
from statetrack.layers import PRESETS
from statetrack.peer_names import PEER_NAMES
from statetrack.peer_options import PEER_OPTIONS


@pytest.mark.parametrize(
    ("call", "ours"),
    [
        (lambda: DeltaNetConfig(allow_neg_eigval=True), 'eigenvalues="[-1,1]"'),
        (lambda: DeltaNetConfig(num_heads=4), "Here: heads."),
        (lambda: DeltaNetConfig(d_state=16), "Mamba mixer"),
        (lambda: DeltaNetConfig(num_v_heads=4), "Here: value_heads"),
        (lambda: Mamba2Config(headdim=64), "Here: heads, with a Mamba-2"),
        (lambda: GLAConfig(gate_logit_normalizer=16), "GLA has 16"),
        (lambda: DeltaNetConfig(output_gate_activation="swish"), "Here: gate_activation"),
        (lambda: MambaConfig(use_conv_bias=False), "Here: conv_bias"),
        (lambda: MambaConfig(time_step_floor=1e-4), "Here: dt_init_floor"),
        (lambda: MambaConfig(d_conv=4), "Here: convolution."),
        (lambda: MLSTMConfig(num_heads=4), "Here: heads."),
        (lambda: build("transformer", 10, window_size=8), "Here: window"),
        (lambda: ModelConfig(hidden_size=64), "Here: d_model."),
        (lambda: TrainingConfig(learning_rate=1e-3), "Here: lr."),
        (lambda: build("deltanet", 10, use_short_conv=False), "convolution=0"),
        (lambda: model_config("gated-deltanet", expand_v=2), "value_dim"),
        (lambda: train("parity", conv_size=4), "Here: convolution."),
    ],
)
def test_an_option_of_another_library_is_answered_with_ours(call, ours):
    with pytest.raises(UserError, match=re.escape(ours)):
        call()
    with pytest.raises(TypeError, match="is not known; it comes from"):
        call()


@pytest.mark.parametrize(
    "flag", ["--num-heads", "--num_heads=4", "--no-use-gate", "--hidden-size", "--d-conv"]
)
def test_a_flag_of_another_library_is_answered_with_ours(flag, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["train", flag, "4"])
    assert exit.value.code == 2
    assert "it comes from" in capsys.readouterr().err


def test_a_spec_with_an_option_of_another_library_is_answered_with_ours():
    data = RunSpec().to_dict()
    data["model"]["mixer"]["num_heads"] = 4
    with pytest.raises(
        UserError, match=r"spec\.model\.mixer: DeltaNetConfig: option 'num_heads'.* Here: heads"
    ):
        RunSpec.from_dict(data)


def test_other_mistakes_get_the_nearest_name():
    with pytest.raises(UserError, match="Did you mean 'heads'"):
        DeltaNetConfig(head=4)
    with pytest.raises(UserError, match="Did you mean 'steps'"):
        train("parity", step=4)


def test_options_that_exist_under_the_same_name_are_not_refused():
    assert MambaConfig(d_state=8, expand=3, dt_rank=4).d_state == 8
    assert ModelConfig(norm_eps=1e-6).norm_eps == 1e-6
    main(["train", "--mixer", "mamba", "--d-state", "8", "--print-spec"])


def test_the_table_points_to_options_that_exist():
    """The word an entry begins with is a field of some config or an argument of build."""
    mixers = {type(preset.mixer) for preset in PRESETS.values()}
    configs = (*mixers, ModelConfig, TrainingConfig)
    known = {name for config in configs for name in config.__dataclass_fields__} | {
        "attention_every",
        "the",
        "nothing",
    }
    for name, (_, ours) in PEER_OPTIONS.items():
        assert re.match(r"\w+", ours)[0] in known, name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: DeltaNet(hidden_size=64, num_heads=4),
            "The constructor: DeltaNet(DeltaNetConfig(), d",
        ),
        (
            lambda: DeltaNet(d_model=64, num_heads=4),
            "'num_heads' is not known; it comes from fla. Here: h",
        ),
        (lambda: Mamba(d_model=64, d_state=16), "expected Mamba(MambaConfig(d_state=...), d_model=64)"),
        (lambda: Mamba(64), "d_model is missing, expected Mamba(MambaConfig(), d_model=64)"),
        (lambda: GLA(64, 4), "config is a int, expected GLA(GLAConfig(), d_model=64)"),
        (lambda: build("mamba", 10, num_heads=4), "Here: heads, though not in mamba"),
    ],
)
def test_a_layer_called_as_in_another_library_shows_its_constructor(call, message):
    with pytest.raises(UserError, match=re.escape(message)):
        call()


def test_the_constructor_of_a_layer_keeps_its_signature():
    assert list(inspect.signature(DeltaNet).parameters) == ["config", "d_model"]
    assert DeltaNet(config=DeltaNetConfig(heads=2), d_model=8).config.heads == 2


@pytest.mark.parametrize("name", ["GatedDeltaNet", "chunk_gated_delta_rule", "selective_scan_fn"])
def test_importing_a_name_of_another_library_says_what_it_is_here(name):
    with pytest.raises(ImportError, match=r"Here: DeltaNet\(|It is in a submodule: from statetrack.compat"):
        exec(f"from statetrack import {name}")


@pytest.mark.parametrize("expression", [x for x in PEER_NAMES.values() if "(" in x])
def test_what_stands_for_a_name_of_another_library_is_there(expression):
    names = {name: getattr(statetrack, name) for name in statetrack.__all__}
    sizes = {"d_model": 64, "vocab_size": 10}
    with torch.device("meta"):
        assert isinstance(eval(expression.split(", or ")[0], names | sizes), torch.nn.Module)


def test_a_misspelt_name_gets_the_nearest_one():
    with pytest.raises(AttributeError, match=r"no attribute 'DeltaNett'\. Did you mean 'DeltaNet'"):
        _ = statetrack.DeltaNett
    assert not hasattr(statetrack, "__wrapped__")


def test_an_unknown_model_lists_mixers_and_not_every_size():
    with pytest.raises(UserError, match="Did you mean 'deltanet'") as error:
        build("delta-net", vocab_size=3)
    assert "deltanet-340m" not in str(error.value)
    assert "and sizes such as" in str(error.value)
