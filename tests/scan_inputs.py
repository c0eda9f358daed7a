"""Inputs for the selective scan, and a run with every gradient."""

import torch

from statetrack.ops.selective_scan import selective_scan

RANGES = ("[0,1]", "[-1,1]")
EXTRAS = ("D", "z", "delta_bias", "initial_state")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_inputs(B=3, T=7, D=6, N=4, *, weights=(1, 1), extras=EXTRAS, seed=0):
    """Inputs by name, float64, delta >= 0 and A < 0. `weights` gives the forms of B and C: a number of
    groups, 1 for (B, N, T), or 0 for constant ones."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def weight(groups):
        return normal(D, N) if groups == 0 else normal(B, N, T) if groups == 1 else normal(B, groups, N, T)

    inputs = {
        "u": normal(B, D, T),
        "delta": normal(B, D, T).square(),
        "A": -normal(D, N).exp(),
        "B": weight(weights[0]),
        "C": weight(weights[1]),
        "D": normal(D),
        "z": normal(B, D, T),
        "delta_bias": normal(D).square(),
        "initial_state": normal(B, D, N),
    }
    return {name: x for name, x in inputs.items() if name in extras or name not in EXTRAS}


def layer_inputs(B, T, D, N, *, states=None, extras=EXTRAS, by_time=()):
    """Inputs by name, float32, like what the Mamba layer hands over: views of (B, T, D) on the device where
    kernels run, but for those `by_time`; `states` first states, one per sequence when None."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    inputs = {
        "u": normal(B, T, D).mT,
        "delta": normal(B, T, D).mT.square(),
        "A": -normal(D, N).exp(),
        "B": normal(B, T, N).mT,
        "C": normal(B, N, T),
        "D": normal(D),
        "z": normal(B, T, D).mT,
        "delta_bias": normal(D).square(),
        "initial_state": normal(B if states is None else states, D, N),
    }
    inputs |= {name: inputs[name].contiguous() for name in by_time}
    return {name: x.to(DEVICE) for name, x in inputs.items() if name in extras or name not in EXTRAS}


def run(inputs, backend, dtype=None, wrt=None, **options):
    """Outputs, last state and gradients of the inputs in `wrt`, for a fixed random loss on both results."""
    wrt = list(inputs) if wrt is None else wrt
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_(name in wrt) for name, x in inputs.items()}
    out, h = selective_scan(**leaves, return_last_state=True, backend=backend, **options)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (out, h)]
    loss = (out * weights[0]).sum() + (h * weights[1]).sum()
    gradients = torch.autograd.grad(loss, [leaves[name] for name in wrt])
    return {"out": out, "h": h} | {f"d{name}": x for name, x in zip(wrt, gradients, strict=True)}


def assert_same(actual, expected, rtol=1e-4, atol=1e-4):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name].double(),
            value.double(),
            rtol=rtol,
            atol=atol,
            msg=lambda m, name=name: f"{name}: {m}",
        )


def cut(inputs, start, stop, initial_state):
    """The inputs of some time steps only, entered by a state."""
    time = {"u": 2, "delta": 2, "z": 2, "B": inputs["B"].ndim - 1, "C": inputs["C"].ndim - 1}
    part = {
        name: x.narrow(time[name], start, stop - start) if name in time else x for name, x in inputs.items()
    }
    return part | {"initial_state": initial_state}
