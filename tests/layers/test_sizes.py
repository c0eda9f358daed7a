"""Language models by size, and hybrids."""

import json

import pytest
import torch

from statetrack.commands.train import read_arguments
from statetrack.errors import UserError
from statetrack.layers import (
    SIZED_PRESETS,
    AttentionConfig,
    DeltaNetConfig,
    MambaConfig,
    ModelConfig,
    build,
    count_parameters,
    model_config,
    register_mixer,
)
from statetrack.layers.presets import preset_names
from statetrack.layers.sizes import MIXERS, SIZES
from statetrack.spec import RunSpec
from statetrack.spectrum import learned_spectra
from statetrack.tasks import task


@pytest.mark.parametrize(
    ("name", "vocabulary", "tied", "expected"),
    [
        ("deltanet-340m", 32_000, False, 374_362_112),
        ("deltanet-340m", 32_000, True, 341_594_112),
        ("deltanet-1.3b", 32_000, False, 1_365_677_056),
        ("deltanet-1.3b", 32_000, True, 1_300_141_056),
        ("mamba-370m", 50_280, True, 371_516_416),
        ("mamba-370m", 32_000, True, 352_797_696),
        ("deltanet-60m", 32_000, True, 55_031_808),
    ],
)
def test_models_have_the_published_number_of_parameters(name, vocabulary, tied, expected):
    assert count_parameters(model_config(name), vocabulary, tied=tied) == expected


def test_presets_are_tied_as_published():
    tied = {name: model_config(name).tied for name in ("deltanet-340m", "deltanet-1.3b", "mamba-370m")}
    assert tied == {"deltanet-340m": False, "deltanet-1.3b": False, "mamba-370m": True}
    assert count_parameters(model_config("deltanet-340m")) == 374_362_112
    assert model_config("deltanet-60m").tied


@pytest.mark.parametrize("size", ["10m", "60m", "340m"])  # the others take longer to build
@pytest.mark.parametrize("mixer", MIXERS)
def test_the_size_in_a_name_is_the_number_of_parameters_to_a_tenth(mixer, size):
    """With a vocabulary of 32,000, tied."""
    number = float(size[:-1]) * (1e9 if size.endswith("b") else 1e6)
    count = count_parameters(SIZED_PRESETS[f"{mixer}-{size}"], tied=True)
    assert 0.9 * number <= count <= 1.1 * number


def test_norms_have_the_eps_of_flash_linear_attention_where_it_trained_them():
    config = model_config("deltanet-340m")
    assert (config.norm_eps, config.mixer.head_norm_eps) == (1e-6, 1e-6)
    model = build("deltanet-10m", vocab_size=5, layers=1)
    norms = [model.norm, model.blocks[0].mixer_norm, model.blocks[0].mlp_norm, model.blocks[0].mixer.norm]
    assert [norm.eps for norm in norms] == [1e-6] * 4
    assert model_config("mamba-370m").norm_eps == model_config("deltanet").norm_eps == 1e-5
    with pytest.raises(UserError, match="DeltaNet: head_norm_eps is 0"):
        build("deltanet", vocab_size=5, head_norm_eps=0.0)


@pytest.mark.parametrize("size", [size for size in SIZES if size != "10m"])
def test_heads_of_deltanet_are_128_wide_from_60m_on(size):
    config = model_config(f"deltanet-{size}")
    assert config.d_model // config.mixer.heads == 128


@pytest.mark.parametrize("name", [f"{mixer}-10m" for mixer in MIXERS])
def test_sized_models_run(name):
    model = build(name, vocab_size=11, layers=2)
    loss, _ = model(torch.zeros(1, 5, dtype=torch.long), targets=torch.ones(1, 5, dtype=torch.long))
    loss.backward()
    assert torch.isfinite(loss)


def test_sized_presets_have_names_flags_and_a_range():
    assert model_config("mamba-370m") == model_config("mamba-340m")
    assert model_config("deltanet-340m", eigenvalues="[0,1]").mixer.eigenvalues == "[0,1]"
    assert model_config("deltanet-340m", tied=True).tied
    words = "--task parity-dense --mixer deltanet-10m --layers 1 --eigenvalues [0,1]"
    _, spec = read_arguments(words.split())
    assert (spec.model.d_model, spec.model.norm_eps, spec.model.mixer.heads) == (192, 1e-6, 3)
    assert spec.model.mixer.eigenvalues == "[0,1]"
    with pytest.raises(UserError, match="Did you mean 'deltanet-340m'"):
        model_config("deltanet-340")
    with pytest.raises(UserError, match="the name 'mamba-60m' is that of a preset"):
        register_mixer("mamba-60m", MambaConfig())


def test_all_names_fit_in_four_lines():
    names = preset_names()
    assert "{10m,60m,170m,340m,1.3b}" in names
    assert "mamba-370m" in names
    assert len(names) < 440


# Hybrids


def test_every_nth_layer_of_a_hybrid_is_attention():
    config = model_config("deltanet-60m", attention_every=4)
    kinds = [type(config.mixer_of(layer)).__name__ for layer in range(config.layers)]
    assert kinds == (["DeltaNetConfig"] * 3 + ["AttentionConfig"]) * 3
    assert (config.mixer_of(0).heads, config.mixer_of(3).heads) == (4, 8)  # of 128 and of 64 channels
    model = build("deltanet", vocab_size=5, d_model=16, layers=4, attention_every=2)
    assert [type(block.mixer).__name__ for block in model.blocks] == ["DeltaNet", "Attention"] * 2


def test_options_go_to_the_mixers_of_a_pattern_that_have_them():
    config = model_config("deltanet", layers=4, attention_every=2, eigenvalues="[0,1]", rotary_base=500.0)
    linear, attention = config.mixers
    assert (linear.eigenvalues, attention.rotary_base) == ("[0,1]", 500.0)
    assert {
        mixer.heads for mixer in model_config("deltanet", layers=2, attention_every=2, heads=8).mixers
    } == {8}
    with pytest.raises(UserError, match="Did you mean 'rotary_base'"):
        model_config("deltanet", layers=2, attention_every=2, rotary=1.0)


def test_the_mixer_of_a_pattern_is_its_first():
    pattern = (MambaConfig(), AttentionConfig())
    assert ModelConfig(mixers=pattern, layers=2).mixer == MambaConfig()
    assert ModelConfig(mixers=pattern, layers=2) == ModelConfig(AttentionConfig(), mixers=pattern, layers=2)
    assert model_config("deltanet", mixers=pattern, layers=2).mixers == pattern
    hybrid = model_config("deltanet", layers=2, attention_every=2)
    assert RunSpec(model=hybrid).id != RunSpec(model=model_config("deltanet", layers=2)).id


@pytest.mark.parametrize("name", ["deltanet-60m", "mamba"])
def test_hybrids_survive_json(name):
    spec = RunSpec(model=model_config(name, layers=4, attention_every=4, eigenvalues="[0,1]")).resolved()
    again = RunSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert again.id == spec.id


def test_hybrids_are_chosen_by_a_flag_and_take_the_flags_of_their_mixers():
    words = "--mixer deltanet --attention-every 2 --layers 4 --eigenvalues [0,1] --d-model 64"
    _, spec = read_arguments(words.split())
    expected = model_config("deltanet", layers=4, attention_every=2, eigenvalues="[0,1]", d_model=64)
    assert spec.model == expected


@pytest.mark.parametrize("every", [1, 3, -2, True, 2.0])
def test_impossible_hybrids_are_refused(every):
    with pytest.raises(UserError, match=r"attention_every is .*, expected 0 \(none\) or from 2"):
        model_config("deltanet", layers=2, attention_every=every)


def test_patterns_longer_than_the_model_are_refused():
    with pytest.raises(UserError, match="mixers has 3 mixers for 2 layers"):
        build("deltanet", vocab_size=5, layers=2, mixers=(DeltaNetConfig(),) * 3)
    with pytest.raises(UserError, match="either a whole mixer or single options"):
        model_config("deltanet", layers=2, mixers=(DeltaNetConfig(),) * 2, attention_every=2)


def test_attention_layers_of_a_hybrid_have_no_spectrum_and_the_others_keep_theirs():
    torch.manual_seed(0)
    spec = RunSpec(task("parity-dense"), model_config("deltanet", d_model=16, layers=4, attention_every=2))
    model = build("deltanet", vocab_size=3, d_model=16, layers=4, attention_every=2)
    found = model.transition_eigenvalues(torch.zeros(2, 5, dtype=torch.long))
    assert [None if x is None else tuple(x.shape) for x in found] == [(2, 5, 4, 4), None] * 2
    assert not model.is_recurrent
    assert [s.layer for s in learned_spectra(model, spec.resolved(), samples=2)] == [0, 2]


def test_the_range_is_part_of_what_is_printed():
    text = str(build("deltanet", vocab_size=5, d_model=16, layers=2, attention_every=2, tied=True))
    assert text.startswith("Model(\n  eigenvalues=[-1,1], parameters=")
    assert "tied=True" in text
    assert "DeltaNet(\n        eigenvalues=[-1,1], heads=4, K=4, V=4" in text
    mamba = str(build("mamba", vocab_size=5, d_model=16, eigenvalues="[0,1]").blocks[0].mixer)
    assert mamba.startswith("Mamba(\n  eigenvalues=[0,1], d_state=16")
    product = build("deltaproduct", vocab_size=5, d_model=16, gated=True).blocks[0].mixer
    assert "gated=True, householders=2" in str(product)
