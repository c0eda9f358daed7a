"""statetrack.compat.mamba_ssm against the signatures and the equations that mamba-ssm documents."""

import pytest
import torch
from published_signatures import MAMBA, parameters, published

from statetrack.compat import mamba_ssm
from statetrack.errors import UserError

RANGES = ("[0,1]", "[-1,1]")


def silu(x):
    return x / (1 + torch.exp(-x))


def softplus(x):
    return torch.log1p(torch.exp(x))


def naive_scan(u, delta, A, B, C, D=None, z=None, bias=None, plus=False, eigenvalues="[0,1]", h=None):
    """The documented recurrence, channel by channel and step by step, in float64; all forms of B and C."""
    u, delta, A, B, C = (x.double() for x in (u, delta, A, B, C))
    (batch, channels, T), N = u.shape, A.shape[1]
    h = torch.zeros(batch, channels, N, dtype=torch.float64) if h is None else h.double().clone()
    out = torch.zeros_like(u)

    def at(weights, b, d, t):
        if weights.ndim == 2:
            return weights[d]
        return weights[b, :, t] if weights.ndim == 3 else weights[b, d * weights.shape[1] // channels, :, t]

    for b in range(batch):
        for d in range(channels):
            for t in range(T):
                step = delta[b, d, t] + (0 if bias is None else bias[d].double())
                step = softplus(step) if plus else step
                a = torch.exp(step * A[d])
                a = 2 * a - 1 if eigenvalues == "[-1,1]" else a
                h[b, d] = a * h[b, d] + step * at(B, b, d, t) * u[b, d, t]
                y = (at(C, b, d, t) * h[b, d]).sum() + (0 if D is None else D[d].double() * u[b, d, t])
                out[b, d, t] = y if z is None else y * silu(z[b, d, t].double())
    return out, h


def scan_inputs(form="variable", batch=2, channels=4, N=3, T=7):
    torch.manual_seed(0)
    u, delta, z = torch.randn(3, batch, channels, T).unbind()
    shape = {"variable": (batch, N, T), "grouped": (batch, 2, N, T), "constant": (channels, N)}[form]
    B, C = torch.randn(2, *shape).unbind()
    A, D, bias = -torch.rand(channels, N), torch.randn(channels), torch.randn(channels)
    return u, delta, A, B, C, D, z, bias


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MAMBA)
def test_signatures_are_those_of_mamba_ssm_and_a_range(name):
    function = getattr(mamba_ssm, name)
    assert parameters(function, without=("eigenvalues",)) == published(MAMBA[name])
    (added,) = [p for p in parameters(function) if p[0] == "eigenvalues"]
    assert added == ("eigenvalues", added[1].KEYWORD_ONLY, "[0,1]")


@pytest.mark.parametrize("form", ["variable", "grouped", "constant"])
@pytest.mark.parametrize("eigenvalues", RANGES)
def test_scan_follows_the_documented_equations(form, eigenvalues):
    u, delta, A, B, C, D, z, bias = scan_inputs(form)
    expected, h = naive_scan(u, delta, A, B, C, D, z, bias, True, eigenvalues)
    out, last = mamba_ssm.selective_scan_fn(
        u, delta, A, B, C, D, z, bias, True, True, eigenvalues=eigenvalues
    )
    close(out, expected)
    close(last, h)
    assert last.dtype == torch.float32
    expected, _ = naive_scan(u, delta.abs(), A, B, C, eigenvalues=eigenvalues)
    close(mamba_ssm.selective_scan_fn(u, delta.abs(), A, B, C, eigenvalues=eigenvalues), expected)


@pytest.mark.parametrize("eigenvalues", RANGES)
def test_state_update_is_one_step_of_the_scan_in_place(eigenvalues):
    u, delta, A, B, C, D, z, bias = scan_inputs(T=1)
    state = torch.randn(2, 4, 3)
    expected, h = naive_scan(u, delta, A, B, C, D, z, bias, True, eigenvalues, state)
    step = (x[..., 0] for x in (u, delta))
    out = mamba_ssm.selective_state_update(
        state, *step, A, B[..., 0], C[..., 0], D, z[..., 0], bias, True, eigenvalues=eigenvalues
    )
    close(out, expected[..., 0])
    close(state, h)


def test_state_update_with_heads_groups_and_tied_channels():
    """As Mamba-2 calls it: one A, step size, bias and D per head, expanded over its channels."""
    torch.manual_seed(0)
    b, h, d, n, groups = 2, 4, 3, 5, 2
    state, x = torch.randn(b, h, d, n), torch.randn(b, h, d)
    dt, bias, D = (
        torch.randn(b, h, 1).expand(b, h, d),
        torch.randn(h, 1).expand(h, d),
        torch.randn(h, 1).expand(h, d),
    )
    A = -torch.rand(h, 1, 1).expand(h, d, n)
    B, C, z = torch.randn(b, groups, n), torch.randn(b, groups, n), torch.randn(b, h, d)
    expected, after = naive_scan(
        x.reshape(b, h * d, 1),
        dt.reshape(b, h * d, 1),
        A.reshape(h * d, n),
        B[..., None],
        C[..., None],
        D.reshape(-1),
        z.reshape(b, h * d, 1),
        bias.reshape(-1),
        True,
        h=state.reshape(b, h * d, n),
    )
    out = mamba_ssm.selective_state_update(state, x, dt, A, B, C, D, z, bias, True)
    close(out, expected.reshape(b, h, d))
    close(state, after.reshape(b, h, d, n))


def test_state_update_picks_rows_and_skips_padding():
    u, delta, A, B, C, _, _, _ = scan_inputs(T=1)
    states = torch.randn(5, 4, 3)
    before = states.clone()
    expected, h = naive_scan(u, delta.abs(), A, B, C, h=states[[3, 0]])
    out = mamba_ssm.selective_state_update(
        states,
        u[..., 0],
        delta[..., 0].abs(),
        A,
        B[..., 0],
        C[..., 0],
        state_batch_indices=torch.tensor([3, -1]),
    )
    close(out[0], expected[0, :, 0])
    close(states[3], h[0])
    assert out[1].eq(0).all()
    assert torch.equal(states[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


def block_inputs(d=4, N=3, rank=2, T=6, width=4, d_model=5):
    torch.manual_seed(0)
    shapes = [(2, 2 * d, T), (d, 1, width), (d,), (rank + 2 * N, d), (d, rank), (d_model, d), (d_model,)]
    tensors = [torch.randn(shape) for shape in shapes]
    return tensors, -torch.rand(d, N), torch.randn(d), torch.randn(d), torch.randn(N), torch.randn(N)


def naive_block(tensors, A, D, bias, B_bias, C_bias, norms=None, eps=1e-6, plus=True, eigenvalues="[0,1]"):
    xz, conv, conv_bias, x_proj, dt_proj, out_proj, out_bias = (x.double() for x in tensors)
    d, N = A.shape
    (batch, _, T), width, rank = xz.shape, conv.shape[-1], dt_proj.shape[1]
    u = torch.zeros(batch, d, T, dtype=torch.float64)
    for t in range(T):
        past = [xz[:, :d, t - i] * conv[:, 0, width - 1 - i] for i in range(min(t + 1, width))]
        u[..., t] = silu(sum(past) + conv_bias)
    projected = torch.einsum("rd,bdt->brt", x_proj, u)
    delta = torch.einsum("dr,brt->bdt", dt_proj, projected[:, :rank])
    B, C = projected[:, rank : rank + N] + B_bias[:, None], projected[:, rank + N :] + C_bias[:, None]
    if norms is not None:
        B, C, delta = (
            x / torch.sqrt((x**2).mean(1, keepdim=True) + eps) * weight.double()[:, None]
            for x, weight in zip((B, C, delta), norms, strict=True)
        )
    y, _ = naive_scan(u, delta, A, B, C, D, xz[:, d:], bias, plus, eigenvalues)
    return torch.einsum("ed,bdt->bte", out_proj, y) + out_bias


@pytest.mark.parametrize("eigenvalues", RANGES)
def test_block_follows_the_documented_equations(eigenvalues):
    tensors, A, D, bias, B_bias, C_bias = block_inputs()
    expected = naive_block(tensors, A, D, bias, B_bias, C_bias, eigenvalues=eigenvalues)
    y = mamba_ssm.mamba_inner_fn(*tensors, A, None, None, D, bias, B_bias, C_bias, eigenvalues=eigenvalues)
    close(y, expected)


def test_block_normalises_B_C_and_the_step_size():
    tensors, A, D, bias, B_bias, C_bias = block_inputs()
    norms = torch.rand(3), torch.rand(3), torch.rand(4)
    expected = naive_block(tensors, A, D, bias, B_bias, C_bias, norms, 1e-2)
    y = mamba_ssm.mamba_inner_fn(*tensors, A, None, None, D, bias, B_bias, C_bias, True, 0, *norms, 1e-2)
    close(y, expected)


def test_block_takes_constant_B_and_C():
    tensors, A, D, bias, _, _ = block_inputs()
    B, C = torch.randn(2, 4, 3).unbind()
    u_only = naive_block_u(tensors)
    delta = torch.einsum(
        "dr,brt->bdt", tensors[4].double(), torch.einsum("rd,bdt->brt", tensors[3].double(), u_only)[:, :2]
    )
    y, _ = naive_scan(u_only, delta, A, B, C, D, tensors[0][:, 4:].double(), bias, True)
    expected = torch.einsum("ed,bdt->bte", tensors[5].double(), y) + tensors[6].double()
    close(mamba_ssm.mamba_inner_fn(*tensors, A, B, C, D, bias), expected)


def naive_block_u(tensors):
    """The block's input after its convolution, by torch's."""
    x, conv, conv_bias = (y.double() for y in (tensors[0][:, :4], tensors[1], tensors[2]))
    return silu(torch.nn.functional.conv1d(x, conv, conv_bias, padding=3, groups=4)[..., : x.shape[-1]])


def test_options_without_a_counterpart_name_the_way_round():
    u, delta, A, B, C, *_ = scan_inputs()
    tensors, block_A, *_ = block_inputs()
    with pytest.raises(UserError, match=r'eigenvalues="\[-1,1\]"'):
        mamba_ssm.selective_scan_fn(u, delta, A + 0j, B, C)
    with pytest.raises(UserError, match="checkpoint_lvl is 2"):
        mamba_ssm.mamba_inner_fn(*tensors, block_A, checkpoint_lvl=2)
    with pytest.raises(UserError, match="Normalise it before"):
        mamba_ssm.mamba_inner_fn(*tensors, block_A, torch.randn(4, 3), b_rms_weight=torch.ones(3))
    with pytest.raises(UserError, match="divides 1 heads"):
        mamba_ssm.selective_state_update(
            torch.zeros(2, 4, 3), u[..., 0], delta[..., 0], A, B[..., :2].mT, C[..., :2].mT
        )


@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
@pytest.mark.parametrize("wide_D", [False, True])
def test_the_scan_of_mamba2_is_its_recurrence(eigenvalues, wide_D):
    torch.manual_seed(0)
    (B, T, H, P, G, N) = 2, 70, 4, 3, 2, 5
    x, z, state = torch.randn(B, T, H, P), torch.randn(B, T, H, P), torch.randn(B, H, P, N)
    dt, bias, A = torch.randn(B, T, H), torch.randn(H), -torch.rand(H)
    D = torch.randn(H, P) if wide_D else torch.randn(H)
    keys, queries = torch.randn(2, B, T, G, N).unbind()
    sequence = torch.tensor([[0] * 20 + [1] * 50, [3] * 70])
    steps = torch.nn.functional.softplus((dt + bias).double()).clamp(0.1, 1.5)
    S, expected = state.double(), []
    for t in range(T):
        a = torch.exp(steps[:, t] * A)
        a = a if eigenvalues == "[0,1]" else 2 * a - 1
        if t > 0:
            a = a * (sequence[:, t] == sequence[:, t - 1])[:, None]
        B_t, C_t = (y[:, t, [0, 0, 1, 1]].double() for y in (keys, queries))
        S = a[..., None, None] * S + (steps[:, t, :, None] * x[:, t])[..., None] * B_t[:, :, None]
        y = (S * C_t[:, :, None]).sum(-1) + (D if wide_D else D[:, None]) * x[:, t]
        expected.append(y * torch.nn.functional.silu(z[:, t]))
    y, last = mamba_ssm.mamba_chunk_scan_combined(
        x,
        dt,
        A,
        keys,
        queries,
        64,
        D,
        z,
        bias,
        state,
        sequence,
        None,
        True,
        (0.1, 1.5),
        True,
        eigenvalues=eigenvalues,
    )
    torch.testing.assert_close(y.double(), torch.stack(expected, 1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last.double(), S, rtol=1e-4, atol=1e-4)
    alone = mamba_ssm.mamba_chunk_scan_combined(x, dt.exp(), A, keys, queries, 64)
    assert alone.shape == x.shape
    with pytest.raises(UserError, match="gated_linear_attention"):
        mamba_ssm.mamba_chunk_scan_combined(x, dt, A, keys, queries, 64, return_varlen_states=True)
    with pytest.raises(UserError, match="expected a divisor of the heads"):
        mamba_ssm.mamba_chunk_scan_combined(x, dt, A, keys[:, :, [0, 1, 1]], queries[:, :, [0, 1, 1]], 64)
