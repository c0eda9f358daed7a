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
