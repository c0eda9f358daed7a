"""Checkpoints of other libraries become ours and theirs again, and compute the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from naive_fla import logits as naive_logits
from trained import trained_run

from statetrack import cli
from statetrack.errors import UserError
from statetrack.files import load_tensors, save_tensors, write_json
from statetrack.layers import AttentionConfig, DeltaNetConfig, MambaConfig, Model, ModelConfig, model_config

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from statetrack.integrations.huggingface.conversion import (  # noqa: E402
    Checkpoint,
    convert,
    read_checkpoint,
    write_checkpoint,
)

VOCABULARY = 40
TOKENS = torch.randint(VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(0))
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LINEAR = DeltaNetConfig(2, head_dim=6, value_dim=12, gated=True, output_gate=True)
ATTENTION = AttentionConfig(4, kv_heads=2, qk_norm=True)
HYBRID = ModelConfig(
    mixers=(LINEAR, LINEAR, ATTENTION), d_model=16, layers=4, mlp_ratio=1.5, attention_norm="post"
)
OLMO = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
THEIRS = {
    "olmo_hybrid": ("olmo_hybrid", OLMO),
    "olmo_hybrid in [0,1]": ("olmo_hybrid", OLMO | {"linear_allow_neg_eigval": False}),
    "olmo_hybrid without positions": ("olmo_hybrid", OLMO | {"rope_parameters": {"rope_theta": None}}),
    "olmo_hybrid tied": ("olmo_hybrid", OLMO | {"tie_word_embeddings": True}),
    "olmo_hybrid with grouped values": ("olmo_hybrid", OLMO | {"linear_num_value_heads": 6}),
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2}),
    "mamba with biases": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "use_bias": True}),
    "mamba without": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "use_conv_bias": False}),
    "mamba untied": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "tie_word_embeddings": False}),
}


LAST_NORMS = ("norm.weight", "model.norm.weight", "backbone.norm_f.weight")


@torch.no_grad()
def scramble(model: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough for logits that depend on the past, and norms that are not all ones."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "embed" in name:
            parameter.normal_()
        elif parameter.ndim > 1 and "A_log" not in name:
            parameter.normal_(std=0.1)
        elif "bias" in name and "dt" not in name and "decay" not in name:
            parameter.normal_(std=0.3)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
            if name in LAST_NORMS:
                parameter.mul_(0.2)  # a tied head has the large weights of the embedding
    return model.eval()


def built(config: ModelConfig) -> Checkpoint:
    model = scramble(Model(config, VOCABULARY, VOCABULARY))
    return Checkpoint(model, "statetrack", NO_TOKENS, 64)


@torch.no_grad()
def ours(model: Model, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    return model(tokens)[0]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def greedy(model) -> torch.Tensor:
    return model.generate(TOKENS[:, :9], max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("case", THEIRS)
@torch.no_grad()
def test_a_model_of_transformers_becomes_ours_and_theirs_again(case, tmp_path):
    family, settings = THEIRS[case]
    config = transformers.AutoConfig.for_model(family, vocab_size=VOCABULARY, **settings, **NO_TOKENS)
    theirs = scramble(AutoModelForCausalLM.from_config(config))
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", family)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("ours", "back")]
    assert [type(model).__name__ for model in models] == ["StateTrackForCausalLM", type(theirs).__name__]
    expected, text = theirs(TOKENS).logits, greedy(theirs)
    for model in models:
        close(model(TOKENS).logits, expected)
        assert torch.equal(greedy(model), text)


@pytest.mark.parametrize("positions", [False, True])
@torch.no_grad()
def test_a_hybrid_of_ours_runs_in_transformers_as_olmo_hybrid(positions, tmp_path):
    checkpoint = built(
        replace(HYBRID, mixers=(LINEAR, LINEAR, replace(ATTENTION, positions=positions)), tied=True)
    )
    write_checkpoint(checkpoint, tmp_path / "olmo", "olmo_hybrid")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "olmo").eval()
    assert theirs.config.linear_allow_neg_eigval
    assert theirs.config.layer_types.count("full_attention") == 1
    close(theirs(TOKENS).logits, ours(checkpoint.model))
    assert read_checkpoint(tmp_path / "olmo").model.config == checkpoint.model.config


@torch.no_grad()
def test_a_model_without_attention_becomes_olmo_hybrid_with_an_idle_layer(tmp_path):
    checkpoint = built(ModelConfig(LINEAR, d_model=16, layers=2, mlp_ratio=2))
    write_checkpoint(checkpoint, tmp_path / "olmo", "olmo_hybrid")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "olmo").eval()
    assert theirs.config.layer_types == ["linear_attention", "linear_attention", "full_attention"]
    close(theirs(TOKENS).logits, ours(checkpoint.model))
    back = read_checkpoint(tmp_path / "olmo").model
    assert back.config == replace(checkpoint.model.config, mixer=LINEAR)
    assert torch.equal(ours(back), ours(checkpoint.model))


def test_olmo_hybrid_is_written_under_the_names_that_other_programs_read(tmp_path):
    write_checkpoint(built(HYBRID), tmp_path / "olmo", "olmo_hybrid")
    shapes = {
        name: tuple(x.shape) for name, x in load_tensors(tmp_path / "olmo/model.safetensors")[0].items()
    }
    assert shapes["model.layers.0.input_layernorm.weight"] == (16,)
    assert shapes["model.layers.0.linear_attn.q_conv1d.weight"] == (12, 1, 4)
    assert shapes["model.layers.0.linear_attn.v_conv1d.weight"] == (24, 1, 4)
    assert shapes["model.layers.2.post_feedforward_layernorm.weight"] == (16,)
    assert shapes["model.layers.2.self_attn.k_proj.weight"] == (8, 16)


DELTANET = DeltaNetConfig(2, head_norm_eps=1e-6)
FLA = {
    "deltanet": ("fla-deltanet", DELTANET, {}),
    "in [0,1]": ("fla-deltanet", replace(DELTANET, eigenvalues="[0,1]"), {"tied": True}),
    "other widths": ("fla-deltanet", replace(DELTANET, head_dim=4, value_dim=12, output_gate=True), {}),
    "no convolution": ("fla-deltanet", replace(DELTANET, convolution=0, qk_activation="identity"), {}),
    "relu": ("fla-deltanet", replace(DELTANET, qk_activation="relu"), {}),
    "gated": ("fla-gated-deltanet", replace(LINEAR, head_norm_eps=1e-6), {}),
    "gated without output gate": ("fla-gated-deltanet", replace(DELTANET, gated=True), {}),
    "grouped values": ("fla-gated-deltanet", replace(LINEAR, head_norm_eps=1e-6, value_heads=6), {}),
    "sigmoid gate": (
        "fla-gated-deltanet",
        replace(LINEAR, head_norm_eps=1e-6, gate_activation="sigmoid", eigenvalues="[0,1]"),
        {},
    ),
    "biases": ("fla-deltanet", None, {"mixers": (DELTANET, AttentionConfig(4, kv_heads=2, qkv_bias=True))}),
    "window": ("fla-deltanet", None, {"mixers": (DELTANET, AttentionConfig(2, window=9))}),
    "hybrid": ("fla-gated-deltanet", None, {"mixers": (replace(DELTANET, gated=True), AttentionConfig(2))}),
    "grouped keys": ("fla-deltanet", None, {"mixers": (DELTANET, AttentionConfig(4, 500.0, kv_heads=2))}),
}


@pytest.mark.parametrize("case", FLA)
def test_a_model_in_the_format_of_fla_computes_what_its_equations_say(case, tmp_path):
    family, mixer, changes = FLA[case]
    own = {"mixer": mixer} if mixer else {}
    config = ModelConfig(**own, d_model=16, layers=2, mlp_ratio=2, norm_eps=1e-6, **changes)
    checkpoint = built(config)
    write_checkpoint(checkpoint, tmp_path / "fla", family)
    settings = json.loads((tmp_path / "fla/config.json").read_text())
    weights, _ = load_tensors(tmp_path / "fla/model.safetensors")
    expected = naive_logits(weights, settings, TOKENS)
    torch.testing.assert_close(ours(checkpoint.model.double()), expected, rtol=0, atol=1e-10)
    back = read_checkpoint(tmp_path / "fla").model
    close(ours(back).double(), expected)


# of `DeltaNetForCausalLM` and `GatedDeltaNetForCausalLM` in flash-linear-attention 0.6.0, built on meta with
# hidden_size 16, 2 heads (of 8), 1 layer, 8 tokens; use_gate of DeltaNet is on
SHARED_SHAPES = {
    "model.embeddings.weight": (8, 16),
    "model.layers.0.attn_norm.weight": (16,),
    "model.layers.0.attn.q_proj.weight": (16, 16),
    "model.layers.0.attn.k_proj.weight": (16, 16),
    "model.layers.0.attn.b_proj.weight": (2, 16),
    "model.layers.0.attn.q_conv1d.weight": (16, 1, 4),
    "model.layers.0.attn.k_conv1d.weight": (16, 1, 4),
    "model.layers.0.mlp_norm.weight": (16,),
    "model.layers.0.mlp.gate_proj.weight": (256, 16),
    "model.layers.0.mlp.up_proj.weight": (256, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 256),
    "model.norm.weight": (16,),
    "lm_head.weight": (8, 16),
}
SHAPES = {
    "fla-deltanet": {
        "model.layers.0.attn.v_proj.weight": (16, 16),
        "model.layers.0.attn.v_conv1d.weight": (16, 1, 4),
        "model.layers.0.attn.g_proj.weight": (16, 16),
        "model.layers.0.attn.o_norm.weight": (8,),
        "model.layers.0.attn.o_proj.weight": (16, 16),
    },
    "fla-gated-deltanet": {
        "model.layers.0.attn.A_log": (2,),
        "model.layers.0.attn.dt_bias": (2,),
        "model.layers.0.attn.a_proj.weight": (2, 16),
        "model.layers.0.attn.v_proj.weight": (32, 16),
        "model.layers.0.attn.v_conv1d.weight": (32, 1, 4),
        "model.layers.0.attn.g_proj.weight": (32, 16),
        "model.layers.0.attn.o_norm.weight": (16,),
        "model.layers.0.attn.o_proj.weight": (16, 32),
    },
}
SETTINGS = {
    "fla-deltanet": {"model_type": "delta_net", "use_gate": True},
    "fla-gated-deltanet": {"model_type": "gated_deltanet", "head_dim": 8},
}


@pytest.mark.parametrize("family", SHAPES)
def test_a_checkpoint_of_fla_is_read_with_the_defaults_of_its_config(family, tmp_path):
    given = {"hidden_size": 16, "num_heads": 2, "num_hidden_layers": 1, "vocab_size": 8} | SETTINGS[family]
    shapes = SHARED_SHAPES | SHAPES[family]
    write_json(tmp_path / "fla/config.json", given)
    save_tensors(
        tmp_path / "fla/model.safetensors", {name: torch.rand(shape) for name, shape in shapes.items()}
    )
    convert(tmp_path / "fla", tmp_path / "back", family)
    weights, settings = load_tensors(tmp_path / "back/model.safetensors")[0], read(tmp_path / "back")
    assert {name: tuple(x.shape) for name, x in weights.items()} == shapes
    assert (settings["norm_eps"], settings["allow_neg_eigval"], settings["use_gate"]) == (1e-6, False, True)


def read(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


UNREADABLE = {
    "values without keys": (
        "olmo_hybrid",
        {"linear_num_value_heads": 6, "linear_num_key_heads": 4},
        "linear_num_value_heads is 6, expected a multiple of linear_num_key_heads = 4",
    ),
    "other values without keys": (
        "gated_deltanet",
        {"num_v_heads": 4, "num_heads": 3},
        "num_v_heads is 4, expected a multiple of num_heads = 3",
    ),
    "attention bias": ("olmo_hybrid", {"attention_bias": True}, "attention_bias is True"),
    "bent positions": (
        "olmo_hybrid",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type is 'linear'",
    ),
    "other norm of keys": ("delta_net", {"qk_norm": "sum"}, "qk_norm is 'sum'"),
    "other activation": ("delta_net", {"qk_activation": "elu"}, "qk_activation is 'elu'"),
    "no beta": ("delta_net", {"use_beta": False}, "use_beta is False"),
    "bias of the convolutions": ("gated_deltanet", {"conv_bias": True}, "conv_bias is True"),
    "another gate": ("gated_deltanet", {"output_gate_activation": "relu"}, "'relu', expected 'swish'"),
    "unknown family": ("llama", {}, "model_type is 'llama', expected one of mamba"),
    "not a config of it": (
        "olmo_hybrid",
        {"layer_types": ["linear_attention"] * 32},
        "at least one attention",
    ),
    "no heads": (
        "olmo_hybrid",
        {"num_attention_heads": 0},
        "config.json is not one of olmo_hybrid: float division",
    ),
    "a word for a size": ("delta_net", {"hidden_size": "x"}, "hidden_size is 'x', expected a whole number"),
    "no size": ("gated_deltanet", {"head_dim": None}, "head_dim is None, expected a whole number"),
    "a truth value for a size": ("delta_net", {"vocab_size": True}, "vocab_size is True, expected a whole"),
    "a word for a number": ("delta_net", {"norm_eps": "x"}, "norm_eps is 'x', expected a number above 0"),
    "a rank that is none": ("mamba", {"time_step_rank": "x"}, "time_step_rank is 'x', expected a whole"),
    "a dtype that is none": ("mamba", {"dtype": []}, "config.json is not one of mamba: list index"),
    "attention that is no table": ("delta_net", {"attn": 7}, "7 stands where a table of settings"),
    "attention without layers": ("delta_net", {"attn": {"num_heads": 2}}, "expected num_heads and layers"),
    "attention behind the end": (
        "gated_deltanet",
        {"attn": {"num_heads": 2, "layers": [21]}},
        "layers has 21, expected numbers from 0 to 20",
    ),
    "no weights": ("mamba", {}, "weights cannot be read"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_our_layers_cannot_compute_is_refused_by_the_name_of_the_option(case, tmp_path):
    model_type, settings, message = UNREADABLE[case]
    write_json(tmp_path / "theirs/config.json", {"model_type": model_type, **settings})
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


UNWRITABLE = {
    "negative eigenvalues": ("mamba", ModelConfig(MambaConfig(), mlp_ratio=0), "eigenvalues is '\\[-1,1\\]'"),
    "another mixer": ("mamba", ModelConfig(LINEAR, mlp_ratio=0), "DeltaNetConfig"),
    "an MLP": ("mamba", ModelConfig(MambaConfig("[0,1]")), "mlp_ratio is 4.0, expected 0"),
    "no gate": ("olmo_hybrid", ModelConfig(DeltaNetConfig(2)), "gated is False"),
    "norms before": ("olmo_hybrid", replace(HYBRID, attention_norm="pre"), "attention_norm is 'pre'"),
    "no norm of q": ("olmo_hybrid", replace(HYBRID, mixers=(LINEAR, AttentionConfig(2))), "qk_norm is False"),
    "several factors": ("fla-deltanet", model_config("deltaproduct", norm_eps=1e-5), "householders is 2"),
    "rotations": (
        "fla-deltanet",
        model_config("deltanet-rotating"),
        "eigenvalues is 'unit-circle', expected",
    ),
    "signed gate": (
        "fla-gated-deltanet",
        model_config("gated-deltanet-signed"),
        "signed_gate is True, expected False",
    ),
    "gate": ("fla-deltanet", ModelConfig(LINEAR), "gated is True, expected False"),
    "two eps": ("fla-gated-deltanet", ModelConfig(LINEAR, norm_eps=1e-6), "head_norm_eps is 1e-05"),
    "two mixers": ("fla-deltanet", ModelConfig(mixers=(DELTANET, LINEAR), layers=2), "2 configurations"),
    "hard betas": (
        "fla-deltanet",
        ModelConfig(replace(DELTANET, beta="hard"), norm_eps=1e-6),
        "beta is 'hard'",
    ),
    "hard gates": (
        "fla-gated-deltanet",
        ModelConfig(replace(LINEAR, gate="hard"), norm_eps=1e-5),
        "gate is 'hard'",
    ),
    "hard gates in OLMo": (
        "olmo_hybrid",
        replace(HYBRID, mixers=(replace(LINEAR, gate="hard"), ATTENTION)),
        "gate is 'hard'",
    ),
    "hard betas in OLMo": (
        "olmo_hybrid",
        replace(HYBRID, mixers=(replace(LINEAR, beta="hard"), ATTENTION)),
        "beta is 'hard'",
    ),
    "a window in OLMo": (
        "olmo_hybrid",
        replace(HYBRID, mixers=(LINEAR, replace(ATTENTION, window=8))),
        "window is 8, expected None",
    ),
    "grouped values without a gate": (
        "fla-deltanet",
        ModelConfig(replace(DELTANET, value_heads=4), norm_eps=1e-6),
        "value_heads is 4, expected None or 2",
    ),
    "sigmoid gate without a decay": (
        "fla-deltanet",
        ModelConfig(replace(DELTANET, output_gate=True, gate_activation="sigmoid"), norm_eps=1e-6),
        "gate_activation is 'sigmoid'",
    ),
    "layer norms": ("fla-deltanet", ModelConfig(DELTANET, norm="layer"), "norm is 'layer'"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_a_family_cannot_express_is_refused_by_the_name_of_the_option(case, tmp_path):
    family, config, message = UNWRITABLE[case]
    with pytest.raises(UserError, match=message):
        write_checkpoint(built(replace(config, d_model=16)), tmp_path / "theirs", family)
    assert not list(tmp_path.iterdir())


def test_weights_that_do_not_belong_are_refused(tmp_path):
    write_checkpoint(
        built(ModelConfig(MambaConfig("[0,1]"), d_model=16, mlp_ratio=0)), tmp_path / "m", "mamba"
    )
    weights, _ = load_tensors(tmp_path / "m/model.safetensors")
    save_tensors(tmp_path / "m/model.safetensors", weights | {"backbone.other": torch.zeros(1)})
    with pytest.raises(UserError, match=r"'backbone.other' is not known"):
        read_checkpoint(tmp_path / "m")
    weights.pop("backbone.norm_f.weight")
    save_tensors(tmp_path / "m/model.safetensors", weights)
    with pytest.raises(UserError, match=r"'backbone.norm_f.weight' is missing"):
        read_checkpoint(tmp_path / "m")
    (tmp_path / "m/model.safetensors").rename(tmp_path / "m/pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin, a pickle"):
        read_checkpoint(tmp_path / "m")


def test_the_command_converts_a_run_and_keeps_its_tokenizer(tmp_path, capsys):
    run, fla, back = trained_run(tmp_path), tmp_path / "fla", tmp_path / "back"
    with pytest.raises(SystemExit, match="2"):
        cli.main(["convert", str(run), str(fla), "--to", "olmo_hybrid"])
    assert "output_gate is False, expected True" in capsys.readouterr().err
    cli.main(["convert", str(run), str(fla), "--to", "fla-gated-deltanet"])
    cli.main(["convert", str(fla), str(back)])
    assert "back: fla-gated-deltanet as statetrack," in capsys.readouterr().out
    assert torch.equal(ours(read_checkpoint(back).model), ours(read_checkpoint(run).model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(back)
    assert tokenizer.decode(tokenizer("two three")["input_ids"]) == "two three"
    assert read(fla)["eos_token_id"] == read(back)["eos_token_id"] == 256
    assert read(back)["context"] == 32
    with pytest.raises(SystemExit, match="2"):
        cli.main(["convert", str(fla), str(back)])
    assert "is not an empty folder" in capsys.readouterr().err
