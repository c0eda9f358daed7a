"""The delta rule with two vectors: its recurrence, and how fast its products can grow."""

import math

import pytest
import torch
import torch.nn.functional as F

from statetrack import delta_rule, generalised_delta_rule
from statetrack.errors import UserError


def inputs(T=9, B=2, H=2, K=4, V=3):
    g = torch.Generator().manual_seed(T)
    shapes = [(B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H, K), (B, T, H, K), (B, T, H, K)]
    q, k, v, w, a, b = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    return [x.requires_grad_() for x in (q, k, v, torch.sigmoid(w).detach(), a / 2, b / 2)]


def test_it_multiplies_by_a_diagonal_less_an_outer_product():
    q, k, v, w, a, b = inputs()
    o, last = generalised_delta_rule(q, k, v, w, a, b, output_final_state=True)
    for n in range(2):
        for h in range(2):
            S = torch.zeros(4, 3, dtype=torch.float64)
            for t in range(9):
                A = torch.diag(w[n, t, h]) - torch.outer(a[n, t, h], b[n, t, h])
                S = A @ S + torch.outer(k[n, t, h], v[n, t, h])
                torch.testing.assert_close(o[n, t, h], S.T @ q[n, t, h] / 2)
            torch.testing.assert_close(last[n, h], S)


def test_with_equal_vectors_it_is_the_delta_rule():
    q, k, v, *_ = inputs(20)
    k, beta = F.normalize(k, dim=-1), 2 * torch.rand(2, 20, 2, dtype=torch.float64)
    scaled = beta[..., None] * k
    actual = generalised_delta_rule(q, scaled, v, torch.ones_like(k), scaled, k, scale=1.0)[0]
    torch.testing.assert_close(actual, delta_rule(q, k, v, beta, scale=1.0)[0])


def test_gated_deltanet_2_is_one_of_its_cases():
    """(I - k (e * k)^T) diag(w) S + k (write * v)^T, first the decay, then what the erase gate selects."""
    q, k, v, w, *_ = inputs(5, B=1, H=1)
    k, erase, write = F.normalize(k, dim=-1), torch.rand_like(k), torch.rand_like(v)
    o, _ = generalised_delta_rule(q, k, write * v, w, k, w * erase * k, scale=1.0)
    S = torch.zeros(4, 3, dtype=torch.float64)
    for t in range(5):
        S = w[0, t, 0, :, None] * S
        S = S - torch.outer(k[0, t, 0], (erase * k)[0, t, 0] @ S) + torch.outer(k[0, t, 0], (write * v)[0, t, 0])
        torch.testing.assert_close(o[0, t, 0], S.T @ q[0, t, 0])


def test_pieces_and_packed_sequences_equal_one_pass():
    tensors = [x[:1] for x in inputs(12)]
    o, last = generalised_delta_rule(*tensors, output_final_state=True)
    first, state = generalised_delta_rule(*(x[:, :5] for x in tensors), output_final_state=True)
    second, _ = generalised_delta_rule(*(x[:, 5:] for x in tensors), initial_state=state)
    torch.testing.assert_close(torch.cat([first, second], 1), o)
    bounds = torch.tensor([0, 5, 5, 12])
    given = torch.cat([0 * state, state, state])
    packed, states = generalised_delta_rule(
        *tensors, initial_state=given, cu_seqlens=bounds, output_final_state=True
    )
    torch.testing.assert_close(packed, o)
    torch.testing.assert_close(states, torch.cat([state, state, last]))


def test_gradients_are_those_of_finite_differences():
    assert torch.autograd.gradcheck(
        lambda *x: generalised_delta_rule(*x, output_final_state=True), inputs(3, B=1, H=1)
    )


def alternating(steps, cosine, top):
    """Vectors of RWKV-7 in two dimensions: two directions, symmetric about the diagonal, take turns, each with
    the rate `top` in one of the channels and 0 in the other. `cosine` is that of twice the angle."""
    angle = math.acos(cosine) / 2
    x = torch.tensor([[math.cos(angle), math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    rate = top * torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    turns = torch.arange(steps) % 2
    return x[turns][None, :, None], rate[turns][None, :, None]


def growth(run, steps=400):
    """The factor per token by which a state grows in the second half of the steps."""
    S = torch.eye(2, dtype=torch.float64)[None, None]
    middle = run(slice(0, steps // 2), S)
    end = run(slice(steps // 2, steps), middle)
    return (end.norm() / middle.norm()).item() ** (2 / steps)


@pytest.mark.parametrize(
    ("top", "cosine", "expected"),
    [(1.0, 2 / 3, math.sqrt(5) / 2), (2.0, (math.sqrt(5) - 1) / 2, math.sqrt((1 + math.sqrt(5)) / 2))],
    ids=["rates in [0,1]: 1.118", "rates in [0,2]: 1.272"],
)
def test_an_alternating_pair_of_unequal_vectors_grows_with_every_token(top, cosine, expected):
    x, rate = alternating(400, cosine, top)
    zero, one = torch.zeros_like(x), torch.ones_like(x)

    def run(part, S):
        now, rates, none = x[:, part], rate[:, part], zero[:, part]
        _, S = generalised_delta_rule(
            none, none, none, one[:, part], rates * now, now, initial_state=S, output_final_state=True
        )
        return S

    assert growth(run) == pytest.approx(expected, rel=1e-6)
    # the eigenvalues of each transition on its own do not show it
    for t in range(2):
        A = torch.eye(2).double() - torch.outer((rate * x)[0, t, 0], x[0, t, 0])
        spectrum = torch.linalg.eigvals(A)
        assert spectrum.imag.abs().max() == 0
        assert spectrum.real.min() >= (0 if top == 1 else -1)
        assert spectrum.real.max() <= 1 + 1e-12


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9, 2.0])
def test_no_pair_of_equal_vectors_grows(beta):
    x, _ = alternating(400, 2 / 3, 1.0)
    betas = torch.full((1, 400, 1), beta, dtype=torch.float64)

    def run(part, S):
        now, zero = x[:, part], torch.zeros_like(x[:, part])
        return delta_rule(zero, now, zero, betas[:, part], initial_state=S, output_final_state=True)[1]

    assert growth(run) <= 1 + 1e-12
    assert run(slice(0, 400), torch.eye(2).double()[None, None]).norm() <= math.sqrt(2) + 1e-9


def test_wrong_inputs_are_refused_by_name():
    q, k, v, w, a, b = (x.detach() for x in inputs())
    with pytest.raises(UserError, match="b has shape .* expected the shape of q"):
        generalised_delta_rule(q, k, v, w, a, b[..., :2])
    with pytest.raises(UserError, match="w is a float, expected a tensor"):
        generalised_delta_rule(q, k, v, 1.0, a, b)
    with pytest.raises(UserError, match="initial_state has shape"):
        generalised_delta_rule(q, k, v, w, a, b, initial_state=torch.zeros(2, 2, 3, 4))
    with pytest.raises(UserError, match="expected one of|backend"):
        generalised_delta_rule(q, k, v, w, a, b, backend="triton")
