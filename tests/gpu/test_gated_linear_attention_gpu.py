"""Gated linear attention's kernels on a real GPU, against a float64 loop written here."""

import itertools

import pytest
import torch

from statetrack.ops.gated_linear_attention import gated_linear_attention

pytestmark = pytest.mark.gpu

KINDS = ("channel", "head")
# halves round what they keep and return; float32 takes products of sixteen bits for outputs and gradients
LIMITS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
SHAPES = [(2, 1, 2, 128, 128), (2, 200, 2, 128, 128), (1, 130, 2, 64, 128), (1, 100, 2, 24, 60)]
SHAPES += [(1, 130, 1, 256, 256), (2, 70, 3, 16, 16)]


def loop(q, k, v, a, S, scale):
    """S_t = diag(a_t) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t."""
    a = a[..., None] if a.ndim == 3 else a
    outputs = []
    for t in range(q.shape[1]):
        S = a[:, t, :, :, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(scale * (S * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outputs, dim=1) if outputs else v, S


def random_inputs(B, T, H, K, V, kind, gates="signed", sequences=None):
    torch.manual_seed(T)
    like = {"device": "cuda", "dtype": torch.float64}
    q, k = torch.randn(2, B, T, H, K, **like).unbind()
    a = 2 * torch.rand((B, T, H) if kind == "head" else (B, T, H, K), **like) - 1
    if gates == "border":
        a = (0.99 + 0.01 * a.abs()) * torch.where(a < 0, -1.0, 1.0)
    elif gates == "zeros":
        a[:, T // 3] = 0
        a[torch.rand(a.shape, device="cuda") < 0.02] = 0
    elif gates == "tiny":
        a[:, T // 4 : 3 * T // 4] = 1e-8
    elif gates == "beyond one":
        a = torch.where(a < 0, -1.005, 1.005) + 0.001 * a
    return q, k, torch.randn(B, T, H, V, **like), a, torch.randn(sequences or B, H, K, V, **like)


def errors(inputs, dtype, bounds=None):
    """Relative errors of outputs, last states and all gradients."""
    q, k, v, a, S = inputs
    given = [q.to(dtype), k.to(dtype), v.to(dtype), a.float(), S.float()]
    exact = [x.double().requires_grad_() for x in given]
    given = [x.requires_grad_() for x in given]
    scale = q.shape[-1] ** -0.5
    if bounds is None:
        o, state = loop(*exact, scale)
    else:
        parts = [
            loop(*[x[:, i:j] for x in exact[:4]], exact[4][n : n + 1], scale)
            for n, (i, j) in enumerate(itertools.pairwise(bounds))
        ]
        o, state = (torch.cat(x, dim=d) for d, x in zip((1, 0), zip(*parts, strict=True), strict=True))
    d_o, d_state = torch.randn_like(o), torch.randn_like(state)
    expected = [o, state, *torch.autograd.grad((o * d_o).sum() + (state * d_state).sum(), exact)]
    q, k, v, a, S = given
    packed = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
    o, state = gated_linear_attention(
        q, k, v, a=a, initial_state=S, output_final_state=True, backend="triton", **packed
    )
    loss = (o * d_o.to(o.dtype)).sum() + (state * d_state.float()).sum()
    actual = [o, state, *torch.autograd.grad(loss, given)]
    names = ("o", "state", "dq", "dk", "dv", "da", "dinitial_state")
    return {
        name: float((x.detach().double() - y.detach()).norm() / y.detach().norm())
        for name, x, y in zip(names, actual, expected, strict=True)
    }


def assert_small(found, limit):
    assert all(error < limit for error in found.values()), found  # NaN is not below it


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_the_loop_in_float64(kind, shape, dtype):
    assert_small(errors(random_inputs(*shape, kind), dtype), LIMITS[dtype])


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("gates", ["zeros", "tiny", "beyond one"])
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_tiny_gates_and_gates_beyond_one_lose_nothing(kind, gates, dtype):
    assert_small(errors(random_inputs(2, 200, 2, 128, 64, kind, gates), dtype), LIMITS[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_near_the_border_float32_stays_within_a_ten_thousandth_over_2048_steps(kind):
    assert_small(errors(random_inputs(1, 2048, 1, 128, 128, kind, "border"), torch.float32), 1e-4)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_come_out_as_if_each_were_alone(kind, dtype):
    bounds = [0, 5, 5, 200, 201, 300]
    inputs = random_inputs(1, 300, 2, 64, 64, kind, "zeros", sequences=5)
    assert_small(errors(inputs, dtype, bounds), LIMITS[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_token_by_token_continues_a_prefill(kind):
    q, k, v, a, S = (x.float() for x in random_inputs(2, 72, 2, 64, 64, kind))
    options = {"output_final_state": True, "backend": "triton"}
    expected, last = gated_linear_attention(q, k, v, a=a, initial_state=S, **options)
    pieces = []
    for start, stop in ((0, 69), (69, 70), (70, 71), (71, 72)):
        now = [x[:, start:stop] for x in (q, k, v)]
        o, S = gated_linear_attention(*now, a=a[:, start:stop], initial_state=S, **options)
        pieces.append(o)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(S, last, rtol=1e-4, atol=1e-4)


def test_auto_takes_the_kernels():
    q, k, v, a, _ = (x.float() for x in random_inputs(2, 70, 2, 64, 64, "channel"))
    by_name, _ = gated_linear_attention(q, k, v, a=a, backend="triton")
    by_default, _ = gated_linear_attention(q, k, v, a=a)
    chunked, _ = gated_linear_attention(q, k, v, a=a, backend="chunked")
    assert torch.equal(by_default, by_name)
    assert not torch.equal(by_default, chunked)  # equal to rounding only
