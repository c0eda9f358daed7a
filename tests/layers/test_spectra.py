"""The eigenvalues that mixers report are those of the linear map which one step applies to the state.

The matrix of that map is found by running the layer on basis states, with no formula of the layer's own.
"""

import pytest
import torch

from statetrack.layers import (
    DeltaNetConfig,
    DenseTransitionConfig,
    DiagonalToyConfig,
    GLAConfig,
    HGRN2Config,
    KDAConfig,
    Mamba2Config,
    Mamba3Config,
    MambaConfig,
    MLSTMConfig,
    SLSTMConfig,
    build,
)

WIDTH = 8
RANGES = ("[0,1]", "[-1,1]")
PLAIN = {"convolution": 0, "heads": 2}
DELTANETS = {
    "one factor": PLAIN,
    "gated": {**PLAIN, "gated": True},
    "with convolution": {"heads": 2, "gated": True},
    "two factors": {**PLAIN, "householders": 2},
    "three factors": {**PLAIN, "householders": 3},
    "two factors, gated": {**PLAIN, "householders": 2, "gated": True},
    "three factors, gated": {**PLAIN, "householders": 3, "gated": True},
    "narrow values": {**PLAIN, "head_dim": 6, "value_dim": 2},
}
OTHERS = {
    "mamba [0,1]": MambaConfig(eigenvalues="[0,1]", d_state=3),
    "mamba [-1,1]": MambaConfig(eigenvalues="[-1,1]", d_state=3),
    "mlstm": MLSTMConfig(heads=2),
    "mlstm [-1,1]": MLSTMConfig(heads=2, eigenvalues="[-1,1]"),
    "mlstm [-1,1] without normaliser": MLSTMConfig(heads=2, eigenvalues="[-1,1]", normaliser=False),
    "slstm": SLSTMConfig(heads=2),
    "dense": DenseTransitionConfig(size=5, init_scale=0.5),
    "diagonal [0,1]": DiagonalToyConfig(eigenvalues="[0,1]"),
    "diagonal [-1,1]": DiagonalToyConfig(eigenvalues="[-1,1]"),
}
CASES = {
    **{f"{name} {r}": DeltaNetConfig(eigenvalues=r, **c) for name, c in DELTANETS.items() for r in RANGES},
    **OTHERS,
    **{
        f"{cls.__name__} {r}": cls(eigenvalues=r, heads=2) for cls in (GLAConfig, HGRN2Config) for r in RANGES
    },
    **{
        f"kda {r}{' signed' * signed}": KDAConfig(heads=2, eigenvalues=r, signed_gate=signed)
        for r in RANGES
        for signed in (False, True)
    },
    "signed gate": DeltaNetConfig(gated=True, signed_gate=True, **PLAIN),
    "rotating": DeltaNetConfig(eigenvalues="unit-circle", **PLAIN),
    "rotating, two factors, signed gate": DeltaNetConfig(
        eigenvalues="unit-circle", householders=2, gated=True, signed_gate=True, **PLAIN
    ),
    **{f"mamba2 {r}": Mamba2Config(eigenvalues=r, heads=2, d_state=3) for r in RANGES},
    **{f"mamba3 {r}": Mamba3Config(eigenvalues=r, heads=2, d_state=4) for r in (*RANGES, "unit-circle")},
}


def memory(state):
    """The part of a state that the transition multiplies, as a tensor (1, groups, n, columns).

    xLSTM keeps its memory divided by exp(m), which is undone here.
    """
    if isinstance(state, torch.Tensor):  # dense: H (1, n, n); diagonal: h (1, n)
        return state[:, None] if state.ndim == 3 else state[:, None, :, None]
    if hasattr(state, "S"):
        return state.S
    if hasattr(state, "h"):
        return state.h[..., None]
    cell = state.cell
    if hasattr(cell, "C"):
        return cell.C * cell.m.exp()[..., None, None]
    return (cell.c * cell.m.exp())[..., None]


def with_memory(state, value):
    """The same state with another memory."""
    if isinstance(state, torch.Tensor):
        return value[:, 0] if state.ndim == 3 else value[:, 0, :, 0]
    if hasattr(state, "S"):
        return state._replace(S=value)
    if hasattr(state, "h"):
        return state._replace(h=value[..., 0])
    cell = state.cell
    if hasattr(cell, "C"):
        return state._replace(cell=cell._replace(C=value * (-cell.m).exp()[..., None, None]))
    return state._replace(cell=cell._replace(c=value[..., 0] * (-cell.m).exp()))


def transition(mixer, x, state):
    """The matrix (groups, n, n) by which the step on x (1, 1, d_model) multiplies the memory of `state`."""
    zero = torch.zeros_like(memory(state))

    def after(value):
        return memory(mixer(x, with_memory(state, value))[1])

    columns = []
    for i in range(zero.shape[2]):
        basis = zero.clone()
        basis[:, :, i] = 1.0
        columns.append((after(basis) - after(zero))[0, :, :, 0])
    return torch.stack(columns, dim=-1)


def assert_same_set(actual, expected, tolerance):
    """Both lists hold the same complex numbers, in any order."""
    left = list(expected.tolist())
    for value in actual.tolist():
        nearest = min(left, key=lambda other: abs(other - value))
        assert abs(nearest - value) <= tolerance, (value, expected)
        left.remove(nearest)
    assert not left


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_eigenvalues_are_those_of_the_transition_seen_from_outside(case):
    torch.manual_seed(0)
    # in float64: an mLSTM may write e^20, beside which the memory of 1 that is followed here has to be seen
    mixer = CASES[case].build(WIDTH, 1).double()
    for p in mixer.parameters():  # gates well away from their initial values
        p.add_(0.4 * torch.randn_like(p))
    x = torch.randn(1, 4, WIDTH).double()
    reported = mixer.transition_eigenvalues(x)
    _, state = mixer(x[:, :1])
    for t in range(1, 4):
        matrices = transition(mixer, x[:, t : t + 1], state)
        spectrum = reported[0, t].reshape(len(matrices), -1)
        for matrix, values in zip(matrices, spectrum, strict=True):
            assert_same_set(values, torch.linalg.eigvals(matrix.double()), 1e-4)
        _, state = mixer(x[:, t : t + 1], state)


@torch.no_grad()
@pytest.mark.parametrize(("eigenvalues", "lowest"), [("[0,1]", 0.0), ("[-1,1]", -1.0)])
@pytest.mark.parametrize("config", [DeltaNetConfig, MambaConfig, DiagonalToyConfig])
def test_saturated_gates_reach_both_ends_of_the_range(config, eigenvalues, lowest):
    mixer, x = config(eigenvalues=eigenvalues).build(WIDTH, 1), torch.ones(1, 1, WIDTH)
    for gate, highest in ((1e3, False), (-1e3, True)):
        if config is DeltaNetConfig:  # beta is 1 times its maximum, or 0
            mixer.to_beta.weight.fill_(gate)
        elif config is MambaConfig:  # the step is large, or 0
            mixer.dt_proj.bias.fill_(gate)
        else:
            mixer.to_a.bias.fill_(-gate)
        spectrum = mixer.transition_eigenvalues(x)
        expected = 1.0 if highest else lowest
        # keys are normalised up to 1e-6 under the root, which is 1e-3 of the short keys at the start
        assert spectrum.min().item() == pytest.approx(expected, abs=5e-3)


def test_gates_move_the_spectrum_of_every_token():
    """So that the test above compares more than ones."""
    torch.manual_seed(0)
    mixer = DeltaNetConfig(heads=2, householders=2, gated=True).build(WIDTH, 1)
    spectrum = mixer.transition_eigenvalues(torch.randn(1, 4, WIDTH))
    assert (spectrum[0, 1:] - spectrum[0, :-1]).abs().amax(dim=-1).min() > 1e-3


def test_two_householders_can_rotate():
    """Proposition 1: a product of two reflections has complex eigenvalues, which one GH factor never has."""
    torch.manual_seed(0)
    model = build("deltaproduct", vocab_size=7)
    assert max(s.imag.abs().max() for s in model.transition_eigenvalues(torch.arange(7)[None])) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_two_halves_with_a_carried_state_have_the_eigenvalues_of_one_pass(name):
    torch.manual_seed(0)
    mixer = CASES[name].build(WIDTH, 1).double()
    for p in mixer.parameters():
        p.add_(0.4 * torch.randn_like(p))
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    _, state = mixer(x[:, :4])
    halves = [mixer.transition_eigenvalues(x[:, :4]), mixer.transition_eigenvalues(x[:, 4:], state)]
    whole = mixer.transition_eigenvalues(x)
    # of a general matrix they come in any order: compare by their power sums
    powers = [torch.stack([s**n for n in (1, 2, 3)]).sum(-1) for s in (torch.cat(halves, dim=1), whole)]
    torch.testing.assert_close(*powers, rtol=1e-6, atol=1e-6)
