"""Inputs for the delta rule, a run with every gradient, and the options every backend must take."""

import pytest
import torch
import torch.nn.functional as F

from statetrack.ops.delta_rule import delta_rule


def random_inputs(
    B=2, T=7, H=2, K=5, V=3, n=1, *, gate=False, state=False, sequences=None, beta=None, seed=0
):
    """Inputs by name, float64, unit keys; `beta` is a number, a pair (low, high) or None for U(0, 2)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    low, high = (0.0, 2.0) if beta is None else (beta, beta) if isinstance(beta, float) else beta
    uniform = torch.rand(B, T * n, H, generator=generator, dtype=torch.float64)
    inputs = {
        "q": normal(B, T, H, K),
        "k": F.normalize(normal(B, T * n, H, K), dim=-1),
        "v": normal(B, T * n, H, V),
        "beta": low + (high - low) * uniform,
    }
    if gate:
        inputs["g"] = -torch.rand(B, T, H, generator=generator, dtype=torch.float64)
    if state:
        inputs["initial_state"] = normal(sequences or B, H, K, V)
    return inputs


def run(inputs, backend, dtype=torch.float64, answer_only=False, **options):
    """Outputs, last state and the gradient of every input, for a fixed random loss on both results.

    `answer_only`: a loss on the last output and on nothing else.
    """
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    o, S = delta_rule(**leaves, output_final_state=True, backend=backend, **options)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (o, S)]
    loss = (o.float() * weights[0].float()).sum() if o.dtype.itemsize == 2 else (o * weights[0]).sum()
    loss = (o[:, -1] * weights[0][:, -1]).sum() if answer_only else loss + (S * weights[1]).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o, "S": S} | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}


def _unchanged(inputs):
    pass


def _zero_values(inputs):
    inputs["v"][:, 16:64] = 0


def _small_betas(inputs):
    inputs["beta"] *= 1e-6


def _some_zero_betas(inputs):
    inputs["beta"][:, ::3] = 0


def _zero_queries(inputs):
    inputs["q"][:] = 0


def _small_keys(inputs):
    inputs["k"] *= 1e-4
    inputs["k"][:, 3] = 0


def _late_outlier(inputs):
    inputs["v"][:, -2] *= 1e8


# Inputs that spread over many orders of size, or leave stretches of zeros: what to change, and the loss.
SPREAD = [
    pytest.param(_unchanged, True, id="one answer"),
    pytest.param(_zero_values, False, id="a stretch of zeros"),
    pytest.param(_zero_values, True, id="zeros and one answer"),
    pytest.param(_small_betas, False, id="small betas"),
    pytest.param(_some_zero_betas, False, id="zeros among the betas"),
    pytest.param(_zero_queries, True, id="zero queries"),
    pytest.param(_small_keys, False, id="small keys"),
    pytest.param(_late_outlier, False, id="a late outlier"),
]


def largest_error(actual, expected):
    """The largest of the errors of all results, each relative to its own size; outputs in two halves."""
    middle = expected["o"].shape[1] - 2
    pairs = [(actual["o"][:, :middle], expected["o"][:, :middle])]
    pairs += [(actual[name], value) for name, value in expected.items()]
    pairs = [(a.detach().double(), e.detach().double()) for a, e in pairs]
    return max(float((a - e).norm() / e.norm().clamp(min=1e-30)) for a, e in pairs)


def assert_same(actual, expected, rtol, atol):
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name].double(),
            value.double(),
            rtol=rtol,
            atol=atol,
            msg=lambda m, name=name: f"{name}: {m}",
        )


OPTIONS = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"gate": True}, {}, id="gate"),
    pytest.param({"state": True}, {}, id="state"),
    pytest.param({}, {"use_qk_l2norm_in_kernel": True}, id="l2norm"),
    pytest.param({"n": 3}, {"householders": 3}, id="householders"),
    pytest.param(
        {"n": 2, "gate": True, "state": True},
        {"householders": 2, "use_qk_l2norm_in_kernel": True, "scale": 0.7},
        id="everything",
    ),
]
