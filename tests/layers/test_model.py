"""The backbone around the mixers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from statetrack.errors import UserError
from statetrack.layers import PRESETS, DeltaNetConfig, Model, build, model_config
from statetrack.layers.mlp import GeGLU, SwiGLU
from statetrack.layers.norm import RMSNorm
from statetrack.tasks import IGNORE, answer_positions, task


@pytest.mark.parametrize("preset", ["deltanet", "mamba", "transformer", "slstm", "diagonal-toy"])
def test_logits_at_some_positions_are_those_of_all_positions(preset):
    torch.manual_seed(0)
    model = Model(model_config(preset, layers=2), 7, 5)
    tokens = torch.randint(7, (3, 11))
    at = torch.tensor([[0, 10], [4, 4], [9, 2]])
    whole, _ = model(tokens)
    wanted = whole.gather(1, at[..., None].expand(-1, -1, 5))
    some, _ = model(tokens, at=at)
    torch.testing.assert_close(some, wanted)
    weight = torch.randn_like(some)
    expected = torch.autograd.grad((wanted * weight).sum(), list(model.parameters()))
    found = torch.autograd.grad((some * weight).sum(), list(model.parameters()))
    for name, a, b in zip(dict(model.named_parameters()), found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", ["parity", "mod-arithmetic", "mod-arithmetic-brackets"])
def test_the_loss_of_a_last_position_task_counts_its_answers_and_nothing_else(name):
    batch = task(name).sample(64, (5, 20), torch.Generator().manual_seed(0))
    at = answer_positions(batch.targets)
    assert (batch.targets.gather(1, at) != IGNORE).all()
    assert (batch.targets != IGNORE).sum() == 64
    logits = torch.randn(*batch.targets.shape, task(name).n_classes)
    whole = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
    answers = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))[:, 0]
    torch.testing.assert_close(F.cross_entropy(answers, batch.targets.gather(1, at)[:, 0]), whole)


@pytest.mark.parametrize(
    ("preset", "width", "mlp", "norm", "residual"),
    [
        ("deltanet", 128, (SwiGLU, 512), RMSNorm, True),
        ("deltanet-no-conv", 128, (SwiGLU, 512), RMSNorm, True),
        ("gated-deltanet", 128, (SwiGLU, 512), RMSNorm, True),
        ("deltaproduct", 128, (SwiGLU, 512), RMSNorm, True),
        ("gated-deltanet-signed", 128, (SwiGLU, 512), RMSNorm, True),
        ("deltanet-rotating", 128, (SwiGLU, 512), RMSNorm, True),
        ("kda", 128, (SwiGLU, 512), RMSNorm, True),
        ("transformer", 128, (SwiGLU, 512), RMSNorm, True),
        ("mamba", 128, None, RMSNorm, True),
        ("mamba2", 128, None, RMSNorm, True),
        ("mamba3", 128, (SwiGLU, 512), RMSNorm, True),
        ("gla", 128, (SwiGLU, 512), RMSNorm, True),
        ("hgrn2", 128, (SwiGLU, 512), RMSNorm, True),
        ("mlstm", 128, None, nn.LayerNorm, True),
        ("slstm", 128, (GeGLU, 192), nn.LayerNorm, True),  # 1.3 x 128, rounded up to a multiple of 64
        ("dense-transition", 128, None, nn.Identity, False),
        ("diagonal-toy", 10, None, nn.LayerNorm, False),
    ],
)
def test_every_preset_has_the_backbone_of_its_paper(preset, width, mlp, norm, residual):
    model = build(preset, vocab_size=5)
    (block,) = model.blocks
    assert model.embedding.weight.shape == model.head.weight.shape == (5, width)
    assert block.residual == residual
    assert {type(model.norm), type(block.mixer_norm)} == {norm}
    if norm is not nn.Identity:
        assert (model.norm.eps, block.mixer_norm.eps) == (1e-5, 1e-5)
    if mlp is None:
        assert (block.mlp, block.mlp_norm) == (None, None)
    else:
        assert (type(block.mlp), block.mlp.down.in_features) == mlp
        assert type(block.mlp_norm) is norm


def test_the_mixers_of_presets_differ_in_what_their_names_say():
    plain = DeltaNetConfig()
    assert (plain.heads, plain.convolution, plain.qk_activation, plain.householders) == (4, 4, "silu", 1)
    assert (plain.gated, plain.output_gate, plain.eigenvalues) == (False, False, "[-1,1]")
    mixers = {name: model_config(name).mixer for name in PRESETS}
    assert mixers["deltanet"] == plain
    assert mixers["deltanet-no-conv"] == replace(plain, convolution=0, qk_activation="identity")
    assert mixers["gated-deltanet"] == replace(plain, gated=True, output_gate=True)
    assert mixers["deltaproduct"] == replace(plain, householders=2)
    assert mixers["gated-deltanet-signed"] == replace(mixers["gated-deltanet"], signed_gate=True)
    assert mixers["deltanet-rotating"] == replace(plain, eigenvalues="unit-circle")


def test_without_read_out_the_model_returns_what_its_head_reads():
    torch.manual_seed(0)
    model = build("deltanet", vocab_size=7, d_model=16, heads=2, layers=2)
    tokens = torch.randint(7, (2, 5))
    hidden, _ = model(tokens, read_out=False)
    assert hidden.shape == (2, 5, 16)
    torch.testing.assert_close(model.head(hidden), model(tokens)[0])


def test_tokens_without_a_batch_axis_are_refused():
    model = build("deltanet", vocab_size=5, d_model=16, heads=2)
    with pytest.raises(UserError, match=r"tokens has shape \(7,\), expected \(batch, time\)"):
        model(torch.zeros(7, dtype=torch.long))
