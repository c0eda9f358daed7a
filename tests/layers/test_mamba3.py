"""Mamba-3 against its published recurrence, and what its ranges can track."""

import math

import pytest
import torch
import torch.nn.functional as F

from statetrack.errors import UserError
from statetrack.layers import Mamba3Config

RANGES = ("[0,1]", "[-1,1]", "unit-circle")
WIDTH = 8


def mixer_of(eigenvalues="unit-circle", **changes):
    """A Mamba-3 in float64 with weights well away from their initial values."""
    torch.manual_seed(0)
    options = {"heads": 4, "d_state": 8, "groups": 2} | changes
    mixer = Mamba3Config(eigenvalues=eigenvalues, **options).build(WIDTH, 1).double()
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.5 * torch.randn_like(p))
        mixer.dt_bias += 2
    return mixer


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x, angle):
    """Neighbouring channels of x (H, N) as complex numbers, turned by angles (H, <= N/2) anticlockwise."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    factor = torch.polar(torch.ones_like(pairs.real), F.pad(angle, (0, pairs.shape[-1] - angle.shape[-1])))
    return torch.view_as_real(pairs * factor).flatten(-2)


@torch.no_grad()
def published_steps(mixer, x, eigenvalues):
    """The outputs on one sequence x (T, d_model), step by step as in mamba-ssm: queries and keys turn, by the
    sum of all angles so far, and every step writes the key and value of the last token and of its own."""
    config, weights = mixer.config, mixer.state_dict()
    H, G, N, D = config.heads, config.groups, config.d_state, config.expand * WIDTH
    angles = int(N * config.rotated) // 2 if eigenvalues == "unit-circle" else 0
    state = torch.zeros(H, N, D // H, dtype=x.dtype)
    total = torch.zeros(H, angles, dtype=x.dtype)
    last_k, last_v = torch.zeros(H, N, dtype=x.dtype), torch.zeros(H, D // H, dtype=x.dtype)
    outputs = []
    for token in x:
        row = weights["in_proj.weight"] @ token
        z, v, B, C, dt, A, trapezoid, angle = row.split([D, D, G * N, G * N, H, H, H, angles])
        z, v = z.view(H, -1), v.view(H, -1)
        k, q = (
            rms(y.view(G, N), weights[f"{name}_norm.weight"]).repeat_interleave(H // G, 0)
            + weights[f"{name}_bias"][:, 0]
            for name, y in (("B", B), ("C", C))
        )
        step = torch.log1p(torch.exp(dt + weights["dt_bias"]))
        speed = torch.where(A >= 0, 1 + A, 1 / (1 - A)).clamp(min=1e-4)
        alpha = torch.exp(-step * speed)
        alpha = 2 * alpha - 1 if eigenvalues == "[-1,1]" else alpha
        own = 1 / (1 + torch.exp(-trapezoid))
        total = total + math.pi * torch.tanh(angle) * step[:, None]
        q, k = turned(q, total), turned(k, total)
        state = (
            alpha[:, None, None] * state
            + (alpha * (1 - own) * step)[:, None, None] * last_k[:, :, None] * last_v[:, None, :]
            + (own * step)[:, None, None] * k[:, :, None] * v[:, None, :]
        )
        last_k, last_v = k, v
        y = (q[:, :, None] * state).sum(1) + weights["D"][:, None] * v
        outputs.append(weights["out_proj.weight"] @ (y * z * torch.sigmoid(z)).flatten())
    return torch.stack(outputs)


@pytest.mark.parametrize("rotated", [0.5, 1])
@pytest.mark.parametrize("eigenvalues", RANGES)
def test_mamba3_takes_the_steps_of_mamba_ssm_on_the_same_weights(eigenvalues, rotated):
    mixer = mixer_of(eigenvalues, rotated=rotated)
    x = torch.randn(2, 70, WIDTH, dtype=torch.float64)
    y, _ = mixer(x)
    for found, sequence in zip(y, x, strict=True):
        torch.testing.assert_close(found, published_steps(mixer, sequence, eigenvalues), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("eigenvalues", RANGES)
def test_gradients_are_those_of_the_published_steps(eigenvalues):
    """What the op adds and the layer takes off again leaves nothing behind in the gradients either."""
    mixer = mixer_of(eigenvalues)
    x = torch.randn(1, 12, WIDTH, dtype=torch.float64)
    direction = torch.randn_like(x)

    def by_steps(shift):
        return (published_steps(mixer, (x + shift * direction)[0], eigenvalues) * weights).sum()

    y, _ = mixer(x.requires_grad_())
    weights = torch.randn_like(y[0])
    (gradient,) = torch.autograd.grad((y[0] * weights).sum(), x)
    slope = (by_steps(1e-6) - by_steps(-1e-6)) / 2e-6
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-6)


def by_hand(eigenvalues, **rows):
    """Two heads that write the token 0 once, as (1, 0), and read both channels; `rows` give, per token, the step
    size before its softplus, A before its function, and the angle before its tanh."""
    config = Mamba3Config(eigenvalues=eigenvalues, heads=2, d_state=2, rotated=1)
    mixer = config.build(3, 1).double()
    zero, one = [0.0] * 3, [1.0] * 3
    weight = [one] * 6 + [[1.0, 0.0, 0.0]] * 6 + [zero] * 4
    weight += [rows["step"]] * 2 + [rows["A"]] * 2 + [zero] * 2
    weight += [rows["angle"]] if eigenvalues == "unit-circle" else []
    reads = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]] if eigenvalues == "unit-circle" else [[[1.0, 0.0]]] * 2)
    mixer.load_state_dict(
        {
            "in_proj.weight": torch.tensor(weight),
            "dt_bias": torch.zeros(2),
            "B_bias": torch.tensor([[[1.0, 0.0]]] * 2),
            "C_bias": reads,
            "B_norm.weight": torch.zeros(2),
            "C_norm.weight": torch.zeros(2),
            "D": torch.zeros(2),
            "out_proj.weight": torch.tensor([[1.0, 0, 0, 0, 0, 0], [0, 0, 0, 1.0, 0, 0], [0.0] * 6]),
        }
    )
    return mixer


def words(batch, length):
    """A start token 0 and then letters 1 (keep) and 2 (act), and how many 2 there were so far."""
    letters = torch.randint(1, 3, (batch, length), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([torch.zeros(batch, 1, dtype=torch.long), letters], dim=1)
    return F.one_hot(tokens, 3).double(), (tokens == 2).cumsum(1)


ONE = math.log(math.e - 1)  # softplus(ONE) = 1


@torch.no_grad()
def test_rotations_count_modulo_sixty_for_thousands_of_tokens():
    mixer = by_hand("unit-circle", step=[ONE, -60.0, ONE], A=[-1e9] * 3, angle=[0.0, 0.0, math.atanh(1 / 30)])
    x, count = words(2, 3000)
    y, _ = mixer(x)
    angle = torch.atan2(-y[..., 1], y[..., 0])
    assert torch.equal(torch.round(angle * 30 / math.pi).long() % 60, count % 60)


@torch.no_grad()
@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
def test_a_signed_gate_computes_the_parity_of_thousands_of_bits_and_an_unsigned_one_forgets(eigenvalues):
    x, count = words(2, 3000)
    y, _ = by_hand(eigenvalues, step=[ONE, -60.0, 60.0], A=[0.0] * 3)(x)
    if eigenvalues == "[-1,1]":
        assert torch.equal(y[..., 0] < 0, count % 2 == 1)
    else:  # each 2 erases the state
        assert torch.equal(y[..., 0].abs() < 1e-9, count > 0)


def test_the_spectrum_of_a_turning_state_lies_inside_the_unit_circle_and_off_the_real_line():
    spectrum = mixer_of().transition_eigenvalues(torch.randn(2, 5, WIDTH).double())
    assert spectrum.shape == (2, 5, 4, 8)
    assert spectrum.abs().max() < 1
    assert spectrum[..., [0, 1, 4, 5]].imag.abs().min() > 0  # two of the four pairs turn
    assert (spectrum[..., [2, 3, 6, 7]].imag == 0).all()
    torch.testing.assert_close(spectrum[..., :4], spectrum[..., 4:].conj())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eigenvalues": "circle"}, 'Mamba3: eigenvalues is \'circle\', expected "[0,1]", "[-1,1]" or "unit-circle"'),
        ({"d_state": 3}, "Mamba3: d_state = 3 with rotated = 0.5 has no pairs to turn. Choose an even d_state"),
        ({"d_state": 2}, "Mamba3: d_state = 2 with rotated = 0.5 has no pairs to turn."),
        ({"rotated": 0.3}, "Mamba3: rotated is 0.3, expected 0.5 or 1."),
        ({"heads": 3}, "Mamba3: heads = 3 does not divide 16."),
        ({"groups": 3}, "Mamba3: groups = 3 does not divide 4."),
        ({"d_state": 0}, "Mamba3: d_state is 0, expected a whole number of at least 1."),
    ],
)
def test_options_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UserError) as refused:
        Mamba3Config(**changes).build(WIDTH, 1)
    assert str(refused.value).startswith(message)


def test_the_range_is_part_of_what_is_printed():
    assert "eigenvalues=unit-circle, heads=4, d_state=8, turning_pairs=2" in str(mixer_of())
    assert "eigenvalues=[-1,1], heads=4, d_state=8\n" in str(mixer_of("[-1,1]"))


def test_an_empty_call_returns_the_state_it_was_given():
    mixer = mixer_of()
    _, state = mixer(torch.randn(2, 3, WIDTH).double())
    y, same = mixer(torch.zeros(2, 0, WIDTH).double(), state)
    assert y.shape == (2, 0, WIDTH)
    for a, b in zip(same, state, strict=True):
        torch.testing.assert_close(a, b)
