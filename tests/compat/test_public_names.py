"""Everything public is at the top of the package, with docstrings whose examples run."""

import doctest
import inspect

import pytest
import torch

import statetrack
from statetrack.compat import fla, mamba_ssm

LAYERS = ("Attention", "DeltaNet", "MLSTM", "Mamba", "Mamba3", "SLSTM")
OPS = ("delta_rule", "generalised_delta_rule", "mlstm", "selective_scan", "short_convolution", "slstm")


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


EXAMPLES = [getattr(statetrack, name) for name in (*LAYERS, "build")]
EXAMPLES += [fla.chunk_delta_rule, fla.chunk_gated_delta_rule, fla.chunk_gla, fla.chunk_kda]
EXAMPLES += [fla.chunk_linear_attn, fla.chunk_hgrn, fla.chunk_dplr_delta_rule]
EXAMPLES += [mamba_ssm.selective_scan_fn, mamba_ssm.mamba_chunk_scan_combined]


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: value.__name__)
def test_the_examples_print_what_they_say(value):
    names = {name: getattr(statetrack, name) for name in statetrack.__all__}
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
