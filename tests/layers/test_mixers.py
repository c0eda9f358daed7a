"""What every mixer promises: one forward for training, prefill and decoding, and its spectrum."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.layers import (
    PRESETS,
    AttentionConfig,
    Model,
    ModelConfig,
    build,
    model_config,
)

VARIANTS = {
    **{name: (name, {}) for name in PRESETS},
    "deltanet-everything": (
        "deltanet",
        {"gated": True, "output_gate": True, "householders": 3, "head_dim": 6, "value_dim": 10, "heads": 2},
    ),
    "mamba-positive": ("mamba", {"eigenvalues": "[0,1]"}),
    "mamba3-signed": ("mamba3", {"eigenvalues": "[-1,1]", "groups": 2}),
    "mlstm-signed": ("mlstm", {"eigenvalues": "[-1,1]"}),
    "mlstm-without-normaliser": ("mlstm", {"eigenvalues": "[-1,1]", "normaliser": False}),
    "slstm-no-convolution": ("slstm", {"convolution": 0, "bias_init": "standard"}),
}


@pytest.fixture(params=VARIANTS)
def model(request):
    name, changes = VARIANTS[request.param]
    torch.manual_seed(0)
    if name not in ("dense-transition", "diagonal-toy"):
        changes = {"d_model": 16, "layers": 2} | changes
    return build(name, vocab_size=7, **changes).double()


def tokens(batch=2, length=13):
    return torch.randint(7, (batch, length), generator=torch.Generator().manual_seed(1))


def test_pieces_with_carried_state_equal_one_pass(model):
    x = tokens()
    whole, _ = model(x)
    state, parts = None, []
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 13)):
        y, state = model(x[:, start:stop], state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-6)  # states are float32


@pytest.mark.parametrize("batch", [1, 5])
def test_tokens_one_by_one_equal_one_pass_whatever_the_batch(model, batch):
    """From the first token on, so that the short convolutions have less behind them than their width."""
    x = tokens(batch, 5)
    whole, end = model(x)
    state, parts = None, []
    for t in range(5):
        y, state = model(x[:, t : t + 1], state)
        parts.append(y)
        if hasattr(state[0], "convolution"):
            torch.testing.assert_close(_shapes(state[0].convolution), _shapes(end[0].convolution))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-6)


def _shapes(states):
    """The shapes of the states of one convolution or of several; none without."""
    return [x.shape for x in ([states] if isinstance(states, torch.Tensor) else states or [])]


def test_outputs_depend_on_the_past_only(model):
    x, changed = tokens(), tokens()
    changed[:, 8] = (changed[:, 8] + 1) % 7
    torch.testing.assert_close(model(x)[0][:, :8], model(changed)[0][:, :8])
    assert not torch.allclose(model(x)[0][:, 8:], model(changed)[0][:, 8:])


def test_nothing_in_gives_nothing_out_and_keeps_the_state(model):
    _, state = model(tokens())
    y, same = model(tokens()[:, :0], state)
    assert y.shape == (2, 0, 7)
    assert all(a is b for a, b in zip(same, state, strict=True))


def test_weights_may_be_bfloat16(model):
    y, _ = model.bfloat16()(tokens())
    assert y.dtype == torch.bfloat16
    assert torch.isfinite(y.float()).all()


def test_every_parameter_gets_a_gradient(model):
    model(tokens())[0].square().sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert missing == []


def test_spectrum_has_one_entry_per_token(model):
    if isinstance(model.config.mixer, AttentionConfig):
        pytest.skip("attention has no transition, see test_attention.py")
    for spectrum in model.transition_eigenvalues(tokens()):
        assert spectrum.shape[:2] == (2, 13)
        assert torch.isfinite(spectrum.abs()).all()


RANGED = [name for name, config in PRESETS.items() if hasattr(config.mixer, "eigenvalues")]


@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
@pytest.mark.parametrize("name", RANGED)
def test_spectrum_keeps_to_its_range_and_reaches_below_zero_only_in_the_extended_one(name, eigenvalues):
    torch.manual_seed(0)
    model = build(name, vocab_size=7, eigenvalues=eigenvalues)
    for p in model.parameters():  # push the gates towards their ends
        p.data *= 6 if p.ndim > 1 else 1
    spectrum = torch.cat([s.flatten() for s in model.transition_eigenvalues(tokens(8, 50))])
    assert spectrum.abs().max() <= 1 + 1e-5
    if not spectrum.is_complex():
        assert spectrum.min() >= (-1e-6 if eigenvalues == "[0,1]" else -1 - 1e-6)
    assert (spectrum.real.min() < -0.1) == (eigenvalues == "[-1,1]")


def test_dense_transition_multiplies_matrices_from_the_identity():
    torch.manual_seed(0)
    mixer = build("dense-transition", vocab_size=7, d_model=16).blocks[0].mixer
    x = torch.randn(1, 4, 16)
    _, H = mixer(x)
    expected = torch.eye(32)
    for A in mixer._transitions(x)[0]:
        expected = A @ expected
    torch.testing.assert_close(H[0], expected, rtol=1e-4, atol=1e-4)


def test_diagonal_toy_follows_its_recurrence():
    torch.manual_seed(0)
    mixer = build("diagonal-toy", vocab_size=3).blocks[0].mixer
    x = torch.randn(2, 9, 10)
    y, _ = mixer(x)
    a, b, h = torch.tanh(10 * mixer.to_a(x)), mixer.to_b(x), torch.zeros(2, 10)
    for t in range(9):
        h = a[:, t] * h + b[:, t]
        torch.testing.assert_close(y[:, t], h)


def test_bfloat16_autocast_trains_without_leaving_float32_states():
    model = build("deltanet", vocab_size=7, d_model=16)
    with torch.autocast("cpu", torch.bfloat16):
        y, states = model(tokens())
    y.float().sum().backward()
    assert states[0].S.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads = 3 does not divide 128"),
        ({"heads": 0}, "heads is 0"),
        ({"eigenvalues": "[0, 1]"}, r'expected "\[0,1\]", "\[-1,1\]" or "unit-circle"'),
        ({"qk_activation": "slu"}, "Did you mean 'silu'"),
        ({"householders": 0}, "at least 1"),
        ({"layers": 0}, "layers is 0"),
        ({"norm": "rmss"}, "Did you mean 'rms'"),
        ({"mlp": "geglue"}, "Did you mean 'geglu'"),
        ({"mlp_ratio": -1.0}, "mlp_ratio is -1.0"),
        ({"hedas": 2}, "Did you mean 'heads'"),
    ],
)
def test_wrong_models_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        build("deltanet", vocab_size=7, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deltanet", {"heads": 3}, "DeltaNet: heads = 3 does not divide 128."),
        ("deltanet", {"eigenvalues": "[0,2]"}, "DeltaNet: eigenvalues is "),
        ("deltanet", {"head_dim": 0}, "DeltaNet: head_dim is 0, expected a whole number of at least 1."),
        (
            "deltanet",
            {"value_dim": 2.5},
            "DeltaNet: value_dim is 2.5, expected a whole number",
        ),
        (
            "deltanet",
            {"convolution": -1},
            "DeltaNet: convolution is -1, expected a whole number of at least 0",
        ),
        ("deltanet", {"qk_activation": "tanh"}, "DeltaNet: qk_activation "),
        ("transformer", {"heads": 3}, "Attention: heads = 3 does not divide 128."),
        ("mamba", {"d_state": 0}, "Mamba: d_state is 0, expected a whole number of at least 1."),
        ("mamba", {"expand": 0}, "Mamba: expand is 0, expected a whole number of at least 1."),
        ("mamba", {"convolution": 0}, "Mamba: convolution is 0, expected a whole number of at least 1."),
        ("mamba", {"dt_rank": True}, "Mamba: dt_rank is True, expected a whole number of at least 1."),
        ("mamba", {"eigenvalues": "[0,2]"}, "Mamba: eigenvalues is "),
        ("mlstm", {"heads": 3}, "MLSTM: heads = 3 does not divide 256."),
        ("mlstm", {"qkv_block": 3}, "MLSTM: qkv_block = 3 does not divide 256."),
        ("mlstm", {"bias_init": "powerlaw"}, "MLSTM: bias_init "),
        ("slstm", {"heads": 3}, "SLSTM: heads = 3 does not divide 128."),
        ("slstm", {"bias_init": "zero"}, "SLSTM: bias_init "),
        (
            "dense-transition",
            {"size": 0},
            "DenseTransition: size is 0, expected a whole number",
        ),
        ("diagonal-toy", {"eigenvalues": "[0,2]"}, "DiagonalToy: eigenvalues is "),
    ],
)
def test_a_refused_mixer_says_which_one_it_is_and_what_is_wrong(name, changes, message):
    with pytest.raises(UserError) as refused:
        build(name, vocab_size=7, **changes)
    assert str(refused.value).startswith(message)


def test_states_of_another_depth_are_refused():
    model = build("deltanet", vocab_size=7, layers=2)
    with pytest.raises(UserError, match="1 states for 2 layers"):
        model(tokens(), [None])


def test_unknown_presets_suggest_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'deltanet'"):
        model_config("deltant")


def test_a_mixer_from_outside_fits_the_backbone():
    """Any object with build(d_model, layers) is a mixer config."""

    class Identity(torch.nn.Module):
        def forward(self, x, state=None):
            return x, state

    class Config:
        def build(self, d_model, layers):
            return Identity()

    logits, _ = Model(ModelConfig(Config(), d_model=8), 5, 5)(torch.zeros(1, 3, dtype=torch.long))
    assert logits.shape == (1, 3, 5)
