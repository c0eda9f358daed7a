"""Everything public is at the top of the package, with docstrings whose examples run."""

import dataclasses
import doctest
import inspect

import pytest
import torch

import statetrack
import statetrack.layers
from statetrack.compat import fla, mamba_ssm
from statetrack.config import _KINDS

LAYERS = ("Attention", "DeltaNet", "GLA", "HGRN2", "KDA", "MLSTM", "Mamba", "Mamba2", "Mamba3", "SLSTM")
OPS = ("delta_rule", "gated_linear_attention", "generalised_delta_rule", "mlstm", "selective_scan")
OPS += ("short_convolution", "slstm")
CONFIGS = [
    value
    for name in (*statetrack.__all__, *statetrack.layers.__all__)
    if dataclasses.is_dataclass(value := getattr(statetrack, name, getattr(statetrack.layers, name, None)))
    and value not in (statetrack.Task,)
]


@pytest.mark.parametrize("name", statetrack.__all__)
def test_every_public_name_can_be_imported_and_says_what_it_is(name):
    value = getattr(statetrack, name)
    assert name in dir(statetrack)
    if callable(value):
        assert inspect.getdoc(value)


@pytest.mark.parametrize("name", [*LAYERS, *OPS])
def test_help_shows_equation_shapes_and_an_example(name):
    text = inspect.getdoc(getattr(statetrack, name))
    assert "= " in text
    assert "Shapes" in text or "(B, T" in text
    assert ">>>" in text


@pytest.mark.parametrize("preset", statetrack.layers.PRESETS.values(), ids=statetrack.layers.PRESETS)
def test_the_mixers_of_all_presets_are_at_the_top(preset):
    config = type(preset.mixer)
    if config.__module__ != "statetrack.layers.baselines":
        assert getattr(statetrack, config.__name__) is config
        mixer = config.__name__.removesuffix("Config")
        assert getattr(statetrack, mixer) is getattr(statetrack.layers, mixer)


EXPLAINED = sorted({*CONFIGS, *_KINDS.values()}, key=lambda config: config.__name__)


@pytest.mark.parametrize("config", EXPLAINED, ids=lambda config: config.__name__)
def test_help_explains_every_field_of_a_config(config):
    text = inspect.getdoc(config)
    lines = text[text.index("\nAttributes:") :] if dataclasses.fields(config) else ""
    for field in dataclasses.fields(config):
        assert f"\n    {field.name}: " in lines, field.name


EXAMPLES = [getattr(statetrack, name) for name in (*LAYERS, "build")]
EXAMPLES += [statetrack.Batch, statetrack.Mixer, statetrack.Model, statetrack.compile_dfa, statetrack.factor]
EXAMPLES += [statetrack.generate, statetrack.layers.DenseTransition, statetrack.layers.DiagonalToy]
EXAMPLES += [fla.chunk_delta_rule, fla.chunk_gated_delta_rule, fla.chunk_gla, fla.chunk_kda]
EXAMPLES += [fla.chunk_linear_attn, fla.chunk_hgrn, fla.chunk_dplr_delta_rule]
EXAMPLES += [mamba_ssm.selective_scan_fn, mamba_ssm.mamba_chunk_scan_combined]


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: value.__name__)
def test_the_examples_print_what_they_say(value):
    names = {name: getattr(statetrack.layers, name) for name in statetrack.layers.__all__}
    names |= {name: getattr(statetrack, name) for name in statetrack.__all__}
    globs = names | {"torch": torch, value.__name__: value}
    (example,) = doctest.DocTestFinder(recurse=False).find(value, value.__name__, globs=globs)
    result = doctest.DocTestRunner().run(example)
    assert result.attempted > 1
    assert result.failed == 0


def test_train_returns_the_model_with_its_metrics(tmp_path, capsys):
    options = {"steps": 4, "batch": 4, "d_model": 8, "heads": 2, "eval_lengths": [4, 8], "eval_samples": 8}
    trained = statetrack.train(
        "s5-swaps", eigenvalues="[0,1]", inputs="up-to-3", out=tmp_path / "run", **options
    )
    assert "step" in capsys.readouterr().out
    assert trained.metrics["accuracy"].keys() == {"4", "8"}
    assert trained.spec.task.inputs == "up-to-3"
    assert trained.model.config.mixer.eigenvalues == "[0,1]"
    spec, model = statetrack.load_run(trained.folder)
    assert spec == trained.spec
    tokens = torch.randint(120, (2, 5))
    assert torch.equal(model(tokens)[0], trained.model(tokens)[0])
    assert str(trained.folder) in repr(trained)


def test_train_takes_objects_and_can_be_silent(tmp_path, capsys):
    config = statetrack.model_config("mamba", d_model=8)
    trained = statetrack.train(
        statetrack.task("parity-dense"), config, steps=2, batch=2, eval_samples=4, out=tmp_path, verbose=False
    )
    assert trained.spec.model == config
    assert capsys.readouterr().out == ""
    with pytest.raises(statetrack.UserError, match="'heads' is not known"):
        statetrack.train("parity", config, heads=2)


def test_train_with_attention_takes_options_of_both_mixers(tmp_path):
    trained = statetrack.train(
        "parity-dense",
        attention_every=2,
        layers=2,
        d_model=8,
        heads=2,
        rotary_base=100.0,
        steps=1,
        batch=2,
        eval_samples=2,
        eval_lengths=(4,),
        out=tmp_path,
        verbose=False,
    )
    assert [type(mixer).__name__ for mixer in trained.spec.model.mixers] == [
        "DeltaNetConfig",
        "AttentionConfig",
    ]
