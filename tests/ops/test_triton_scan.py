"""The Triton selective scan against the reference; interpreted on a CPU, compiled on a GPU."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops import selective_scan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXTRAS = ("D", "z", "delta_bias", "initial_state")


def random_inputs(B=2, T=19, D=5, N=4, extras=EXTRAS):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    inputs = {
        "u": normal(B, T, D).mT,  # time outside, as the Mamba layer hands it over
        "delta": normal(B, D, T).square(),
        "A": -normal(D, N).exp(),
        "B": normal(B, N, T),
        "C": normal(B, N, T),
        "D": normal(D),
        "z": normal(B, D, T),
        "delta_bias": normal(D).square(),
        "initial_state": normal(B, D, N),
    }
    return {name: x.to(DEVICE) for name, x in inputs.items() if name in extras or name not in EXTRAS}


def run(inputs, backend, dtype, **options):
    """Outputs, last state and every gradient for a fixed random loss on both results."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    out, h = selective_scan(**leaves, return_last_state=True, backend=backend, **options)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator).to(DEVICE) for x in (out, h)]
    loss = (out.float() * weights[0]).sum() + (h * weights[1]).sum()
    return {"out": out, "h": h} | dict(
        zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)
    )


def assert_same(actual, expected, tolerance):
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name].float(),
            value.float(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
@pytest.mark.parametrize(("extras", "softplus"), [((), False), (EXTRAS, True), (("z",), False)])
def test_triton_matches_reference(extras, softplus, eigenvalues):
    options = {"delta_softplus": softplus, "eigenvalues": eigenvalues}
    inputs = random_inputs(extras=extras)
    expected = run(inputs, "reference", torch.float32, **options)
    assert_same(run(inputs, "triton", torch.float32, **options), expected, 1e-4)


@pytest.mark.parametrize(("T", "D", "N"), [(1, 3, 1), (15, 33, 2), (16, 1, 5), (17, 32, 16), (33, 4, 3)])
def test_triton_matches_reference_at_odd_sizes(T, D, N):
    inputs = random_inputs(B=1, T=T, D=D, N=N)
    options = {"delta_softplus": True, "eigenvalues": "[-1,1]"}
    expected = run(inputs, "reference", torch.float32, **options)
    assert_same(run(inputs, "triton", torch.float32, **options), expected, 1e-4)


def test_halves_are_read_and_written_as_halves():
    inputs = {name: x.half().float() for name, x in random_inputs(B=1, T=9).items()}
    options = {"delta_softplus": True, "eigenvalues": "[-1,1]"}
    actual = run(inputs, "triton", torch.float16, **options)
    assert (actual["out"].dtype, actual["h"].dtype) == (torch.float16, torch.float32)
    assert_same(actual, run(inputs, "reference", torch.float32, **options), 2e-2)  # float16 has ten bits


def test_groups_and_constants_are_left_to_the_other_backends():
    inputs = random_inputs()
    with pytest.raises(UserError, match="constant or come in several groups"):
        selective_scan(**inputs | {"B": torch.ones(5, 4, device=DEVICE)}, backend="triton")
