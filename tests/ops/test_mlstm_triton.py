"""The mLSTM's Triton kernels against the loop of the reference in float64: outputs, last state, gradients."""

import pytest
import torch
from sm90 import assert_fits, compile_sm90

from statetrack.errors import UserError
from statetrack.ops.mlstm import mlstm, mlstm_joined
from statetrack.ops.mlstm.reference import EPS
from statetrack.ops.mlstm.triton.kernels import backward_kernel, forward_kernel


def inputs(B: int, T: int, H: int, K: int, V: int, spread: float = 1.0, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H), (B, T, H)]
    q, k, v, i, f = (torch.randn(shape, generator=generator) for shape in shapes)
    return [q, k, v, spread * i, spread * f]


def run(given, backend, dtype, of_state=False):
    leaves = [x.to(dtype).requires_grad_() for x in given]
    h, last = mlstm(*leaves, backend=backend)
    loss = (h * torch.linspace(-1, 1, h.numel(), dtype=h.dtype).view_as(h)).sum()
    if of_state:
        # C / n does not depend on how both are scaled
        loss = loss + (last.C / (last.n.square().sum(-1)[..., None, None] + 1).sqrt()).square().sum()
    return [h, *last, *torch.autograd.grad(loss, leaves)]


def assert_near(actual, expected, tolerance):
    for x, y in zip(actual, expected, strict=True):
        largest = max(1e-3, y.abs().max().item())
        assert (x - y).abs().max().item() <= tolerance * largest


@pytest.mark.parametrize("spread", [1.0, 8.0])
@pytest.mark.parametrize(
    ("B", "T", "H", "K", "V"), [(1, 1, 1, 16, 16), (2, 20, 2, 32, 16), (1, 17, 3, 24, 40), (1, 64, 1, 16, 16)]
)
def test_triton_matches_the_reference_forward_and_backward(B, T, H, K, V, spread):
    given = inputs(B, T, H, K, V, spread)
    assert_near(
        run(given, "triton", torch.float32),
        run(given, "reference", torch.float64),
        2e-4 if spread > 1 else 2e-5,
    )


def test_gradients_of_the_last_state_reach_the_inputs():
    given = inputs(2, 9, 1, 16, 16)
    expected = run(given, "reference", torch.float64, of_state=True)
    assert_near(run(given, "triton", torch.float32, of_state=True), expected, 2e-5)


def joined(given, backend, dtype, of_state=False):
    """As `run`, with q, k and v in one tensor."""
    qkv = torch.stack(given[:3], 2)
    leaves = [x.to(dtype).requires_grad_() for x in (qkv, *given[3:])]
    h, last = mlstm_joined(*leaves, backend=backend)
    loss = (h * torch.linspace(-1, 1, h.numel(), dtype=h.dtype).view_as(h)).sum()
    if of_state:
        loss = loss + (last.C / (last.n.square().sum(-1)[..., None, None] + 1).sqrt()).square().sum()
    dqkv, di, df = torch.autograd.grad(loss, leaves)
    return [h, *last, *dqkv.unbind(2), di, df]


@pytest.mark.parametrize("of_state", [False, True])
@pytest.mark.parametrize("backend", ["triton", "chunked", "reference"])
def test_parts_of_one_tensor_are_read_where_they_are(backend, of_state):
    given = inputs(2, 11, 2, 24, 24)
    expected = run(given, "reference", torch.float64, of_state)
    assert_near(joined(given, backend, torch.float32, of_state), expected, 2e-5)


def test_the_joined_op_explains_wrong_shapes():
    q, k, v, i, f = inputs(1, 3, 2, 16, 16)
    with pytest.raises(UserError, match=r"expected \(batch, time, 3, heads, width\)"):
        mlstm_joined(q, i, f)
    with pytest.raises(UserError, match="f has shape"):
        mlstm_joined(torch.stack([q, k, v], 2), i, f[..., :1])


def test_closed_forget_gates_leave_differences_of_their_sums_exact():
    given = inputs(1, 40, 1, 16, 16)
    given[4] = given[4] - 80.0
    assert_near(run(given, "triton", torch.float32), run(given, "reference", torch.float64), 2e-5)


@pytest.mark.parametrize("value", [-1e15, -1e30, -float("inf")])
def test_a_gate_closed_by_any_number_leaves_what_follows_exact(value):
    *rest, f = inputs(1, 20, 1, 16, 16)
    # -1e7 is closed just as well, and has a derivative in PyTorch
    closed, exact = (torch.where(torch.arange(20)[:, None] == 7, x, f) for x in (value, -1e7))
    actual = run([*rest, closed], "triton", torch.float32)
    assert_near(actual, run([*rest, exact], "reference", torch.float64), 2e-5)


def test_a_tiny_normaliser_is_bounded_by_eps_and_so_is_its_gradient():
    """Input gates open so far that exp(-m) is below EPS: what m gives to h does not cancel any more."""
    given = inputs(2, 10, 1, 16, 16)
    given[0], given[3] = 1e-6 * given[0], given[3] + 18.0
    actual, expected = run(given, "triton", torch.float32), run(given, "reference", torch.float64)
    assert expected[-2].abs().max() > 0.1
    assert_near(actual, expected, 1e-4)


def test_half_precision_inputs_are_taken_as_they_are():
    given = [x.bfloat16() for x in inputs(2, 12, 2, 16, 16)]
    h, _ = mlstm(*given, backend="triton")
    expected, _ = mlstm(*[x.double() for x in given], backend="reference")
    assert h.dtype == torch.bfloat16
    torch.testing.assert_close(h.double(), expected, rtol=0.01, atol=0.01)


def test_what_the_kernels_cannot_take_is_refused_by_name_and_served_by_auto():
    given = inputs(1, 65, 1, 16, 16)
    with pytest.raises(UserError, match="65 steps, more than 64"):
        mlstm(*given, backend="triton")
    assert mlstm(*given)[0].shape == (1, 65, 1, 16)
    _, state = mlstm(*inputs(1, 3, 1, 16, 16), backend="triton")
    with pytest.raises(UserError, match="a state enters"):
        mlstm(*inputs(1, 3, 1, 16, 16), initial_state=state, backend="triton")


@pytest.mark.parametrize(
    ("K", "dtype", "spilled"), [(32, "*bf16", 0), (64, "*bf16", 64), (128, "*bf16", 440), (64, "*fp32", 560)]
)
def test_the_kernels_compile_for_sm_90_with_few_spills(K, dtype, spilled):
    module, half = "statetrack.ops.mlstm.triton.kernels", dtype == "*bf16"
    constants = {"K": K, "V": K, "BT": 64, "BK": K, "BV": K, "PARTS": 3, "EPS": EPS, "BF16": half}
    numbers = {"T": "i32", "H": "i32", "scale": "fp32"}
    inputs = ("q", "k", "v", "dq", "dk", "dv") + (("h", "dh") if half else ())
    for kernel in (forward_kernel, backward_kernel):
        pointers = [name for name in kernel.arg_names if name not in constants | numbers]
        types = {name: dtype if name in inputs else "*fp32" for name in pointers} | numbers
        assert_fits(compile_sm90(f"{module}:{kernel.__name__}", types, constants, 8), spilled)


def test_packed_sequences_are_those_of_the_reference():
    given, bounds = inputs(1, 20, 2, 16, 16), torch.tensor([0, 7, 7, 8, 20])

    def packed(backend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        h, last = mlstm(*leaves, cu_seqlens=bounds, max_seqlen=15, backend=backend)
        return [h, last.C, last.n, *torch.autograd.grad(h.cos().sum() + last.C.sin().sum(), leaves)]

    assert_near(packed("triton", torch.float32), packed("reference", torch.float64), 2e-5)
