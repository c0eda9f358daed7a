"""Initial weights: the constants of the papers and of the authors' code."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from statetrack.layers import (
    MLSTM,
    Attention,
    AttentionConfig,
    DeltaNetConfig,
    DenseTransitionConfig,
    Mamba,
    MambaConfig,
    MLSTMConfig,
    build,
)

MANY = 200_000  # draws, so that their least and largest show the bounds of a uniform distribution


def assert_uniform(x, low, high):
    """The smallest and the largest lie at the bounds, and the mean and the variance are right."""
    span = high - low
    slack = 30 * span / x.numel() + 1e-6 * abs(high)
    assert low - 1e-6 * abs(low) <= x.min() <= low + slack
    assert high - slack <= x.max() <= high + 1e-6 * abs(high)
    deviations = 5 * span / math.sqrt(12 * x.numel())
    assert x.mean().item() == pytest.approx((low + high) / 2, abs=deviations)
    assert x.std().item() == pytest.approx(span / math.sqrt(12), rel=6 / math.sqrt(x.numel()))


def assert_normal(x, std):
    assert x.mean().item() == pytest.approx(0, abs=5 * std / math.sqrt(x.numel()))
    assert x.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * x.numel()))
    assert x.abs().max() > 2 * std  # a uniform distribution ends at 1.73 std


def test_decays_of_gated_deltanet_start_uniform_in_0001_to_16():
    torch.manual_seed(0)
    mixer = DeltaNetConfig(heads=MANY, head_dim=1, convolution=0, gated=True).build(1, 1)
    assert_uniform(mixer.A_log.detach().double().exp(), 1e-3, 16.0)


def assert_log_uniform_steps(bias):
    # softplus in float32 loses digits of the smallest steps
    log_steps = F.softplus(bias.detach().double()).log()
    assert_uniform(log_steps, math.log(1e-3), math.log(0.1))


def test_step_sizes_of_gated_deltanet_start_log_uniform_in_0001_to_01():
    torch.manual_seed(0)
    mixer = DeltaNetConfig(heads=MANY, head_dim=1, convolution=0, gated=True).build(1, 1)
    assert_log_uniform_steps(mixer.decay_bias)


def test_a_rotating_deltanet_starts_near_deltanet():
    """Weights of the angles are a hundredth of a Xavier draw like that of the keys, gain 2^-2.5."""
    torch.manual_seed(0)
    mixer = DeltaNetConfig(heads=4, eigenvalues="unit-circle").build(256, 1)
    assert_uniform(mixer.to_angle.weight.detach(), *(0.01 * s * (6 / 384) ** 0.5 / 2**2.5 for s in (-1, 1)))
    assert_uniform(mixer.to_k.weight.detach(), *(s * (6 / 512) ** 0.5 / 2**2.5 for s in (-1, 1)))


def test_step_sizes_of_mamba_start_log_uniform_in_0001_to_01():
    torch.manual_seed(0)
    mixer = MambaConfig(expand=MANY, d_state=1).build(1, 1)
    assert_log_uniform_steps(mixer.dt_proj.bias)


def test_transitions_of_mamba_start_at_1_to_n_in_every_channel():
    mixer = MambaConfig(d_state=6).build(4, 1)
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).log().expand(8, 6)
    torch.testing.assert_close(mixer.A_log.detach(), expected)
    assert torch.equal(mixer.D, torch.ones(8))


@pytest.mark.parametrize(("d_model", "dt_rank", "expected"), [(64, None, 4), (65, None, 5), (64, 9, 9)])
def test_the_step_projection_of_mamba_starts_within_its_rank(d_model, dt_rank, expected):
    torch.manual_seed(0)
    mixer = MambaConfig(expand=500, d_state=1, dt_rank=dt_rank).build(d_model, 1)
    assert mixer.dt_rank == expected
    assert_uniform(mixer.dt_proj.weight.detach(), -(expected**-0.5), expected**-0.5)


@pytest.mark.parametrize("layers", [1, 9])
def test_the_output_of_mamba_shrinks_with_the_square_root_of_the_depth(layers):
    """From PyTorch's own range for a linear map of 512 inputs."""
    torch.manual_seed(0)
    mixer = MambaConfig(d_state=1).build(256, layers)
    bound = 512**-0.5 / math.sqrt(layers)
    assert_uniform(mixer.out_proj.weight.detach(), -bound, bound)
    assert_uniform(mixer.in_proj.weight.detach(), -(256**-0.5), 256**-0.5)


@pytest.mark.parametrize(
    ("mixer", "config"), [(Mamba, MambaConfig()), (Attention, AttentionConfig()), (MLSTM, MLSTMConfig())]
)
def test_a_mixer_outside_a_backbone_starts_as_the_only_layer(mixer, config):
    torch.manual_seed(0)
    alone = mixer(config, 32)
    torch.manual_seed(0)
    only = config.build(32, 1)
    torch.testing.assert_close(alone.state_dict(), only.state_dict(), rtol=0, atol=0)


def test_every_linear_map_of_deltanet_starts_xavier_uniform_with_gain_one_over_root_32():
    torch.manual_seed(0)
    config = DeltaNetConfig(heads=20, head_dim=8, value_dim=16, gated=True, output_gate=True, householders=2)
    mixer = config.build(192, 4)
    linears = {name: module for name, module in mixer.named_children() if isinstance(module, nn.Linear)}
    assert linears.keys() == {"to_q", "to_k", "to_v", "to_beta", "to_decay", "output_gate", "to_out"}
    for linear in linears.values():
        bound = 2**-2.5 * math.sqrt(6 / (linear.in_features + linear.out_features))
        assert_uniform(linear.weight.detach(), -bound, bound)


@pytest.mark.parametrize("layers", [1, 8])
def test_attention_starts_normal_and_its_output_shrinks_with_the_depth(layers):
    torch.manual_seed(0)
    mixer = AttentionConfig().build(256, layers)
    assert_normal(mixer.to_qkv.weight, 0.02)
    assert_normal(mixer.to_out.weight, 0.02 / math.sqrt(2 * layers))


@pytest.mark.parametrize("layers", [1, 8])
def test_the_backbone_starts_normal_and_its_mlp_shrinks_with_the_depth(layers):
    torch.manual_seed(0)
    model = build("deltanet", vocab_size=300, n_classes=200, layers=layers, d_model=128)
    assert_normal(model.embedding.weight, 0.02)
    assert_normal(model.head.weight, 0.02)
    for block in model.blocks:
        assert_normal(block.mlp.gate.weight, 0.02)
        assert_normal(block.mlp.up.weight, 0.02)
        assert_normal(block.mlp.down.weight, 0.02 / math.sqrt(2 * layers))


@pytest.mark.parametrize("layers", [1, 4])
def test_the_mlp_of_slstm_starts_as_published(layers):
    torch.manual_seed(0)
    mlp = build("slstm", vocab_size=3, d_model=256, layers=layers).blocks[0].mlp
    assert_normal(mlp.gate.weight, math.sqrt(2 / 5 / 256))
    assert_normal(mlp.up.weight, math.sqrt(2 / 5 / 256))
    assert_normal(mlp.down.weight, 2 / layers / 16)


@pytest.mark.parametrize("layers", [1, 4])
def test_mlstm_starts_as_published(layers):
    torch.manual_seed(0)
    mixer = build("mlstm", vocab_size=3, d_model=256, heads=256, layers=layers).blocks[-1].mixer
    for linear in (mixer.to_up, mixer.to_q, mixer.to_k, mixer.to_v):
        assert_normal(linear.weight, math.sqrt(2 / 5 / 256))
    assert_normal(mixer.to_out.weight, 2 / layers / 16)
    assert_normal(mixer.to_i.bias, 0.1)
    for gate in (mixer.to_i, mixer.to_f):
        assert torch.equal(gate.weight, torch.zeros(256, 3 * 512))
    assert torch.equal(mixer.skip, torch.ones(512))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_forget_gates_of_mlstm_start_evenly_from_3_to_6(heads):
    mixer = build("mlstm", vocab_size=3, heads=heads).blocks[0].mixer
    expected = {1: [3.0], 2: [3.0, 6.0], 4: [3.0, 4.0, 5.0, 6.0]}[heads]
    torch.testing.assert_close(mixer.to_f.bias.data, torch.tensor(expected))


@pytest.mark.parametrize(
    ("layers", "layer", "middle"),
    [
        (1, 0, 5 - 12 * 0.5**0.3),
        (3, 0, 5 - 12 * 0.5**0.3),
        (3, 1, 5 - 12 * 0.5**0.95),
        (3, 2, 5 - 12 * 0.5**1.6),
    ],
)
def test_forget_gates_of_slstm_start_from_5_down_to_minus_7_by_a_power_of_the_depth(layers, layer, middle):
    bias = build("slstm", vocab_size=3, d_model=12, heads=4, layers=layers).blocks[layer].mixer.bias
    torch.testing.assert_close(bias.data[:, 1], torch.tensor([5.0, middle, -7.0]).expand(4, 3))
    assert bias[:, (0, 2, 3)].abs().max() == 0


def test_forget_gates_of_slstm_may_start_from_3_up_to_6():
    bias = build("slstm", vocab_size=3, d_model=12, heads=4, bias_init="linspace").blocks[0].mixer.bias
    torch.testing.assert_close(bias.data[:, 1], torch.tensor([3.0, 4.5, 6.0]).expand(4, 3))
    assert bias[:, (0, 2, 3)].abs().max() == 0


def test_all_biases_of_slstm_may_start_uniform():
    torch.manual_seed(0)
    bias = build("slstm", vocab_size=3, d_model=4096, heads=4096, bias_init="standard").blocks[0].mixer.bias
    assert_uniform(bias.detach(), -1 / 64, 1 / 64)


def test_the_recurrent_weights_of_slstm_start_at_zero_and_its_gates_small():
    torch.manual_seed(0)
    mixer = build("slstm", vocab_size=3, d_model=256).blocks[0].mixer
    assert mixer.recurrent.abs().max() == 0
    for gate in (mixer.to_i, mixer.to_f, mixer.to_z, mixer.to_o):
        assert_normal(gate.weight, math.sqrt(2 / 5 / 256))


def test_dense_transitions_start_this_near_to_the_identity():
    """On embeddings as they start, N(0, 0.02^2)."""
    torch.manual_seed(0)
    mixer = DenseTransitionConfig(size=16, init_scale=0.05).build(64, 1)
    x = 0.02 * torch.randn(1, 200, 64)
    change = mixer(x[:, :1])[1] - torch.eye(16)
    assert change.std().item() == pytest.approx(0.05, rel=0.2)
    assert mixer.to_transition.bias.abs().max() == 0
    assert_normal(mixer.to_transition.weight, 0.05 / (0.02 * 8))


@pytest.mark.parametrize(
    ("preset", "spared"),
    [
        ("gated-deltanet", {"A_log", "decay_bias"}),
        ("mamba", {"A_log", "D"}),
        ("slstm", {"recurrent", "bias"}),
        ("mlstm", set()),
        ("transformer", set()),
    ],
)
def test_parameters_marked_against_weight_decay(preset, spared):
    mixer = build(preset, vocab_size=3).blocks[0].mixer
    marked = {name for name, p in mixer.named_parameters() if getattr(p, "no_weight_decay", False)}
    assert marked == spared
