"""q, k and v from one product, rotated: both backends are one function, with the same gradient."""

import pytest
import torch
from sm90 import assert_fits, compile_sm90

from statetrack.errors import UserError
from statetrack.ops.rotary import rotated_split
from statetrack.ops.rotary.triton.backend import constants, turns_per_step


def product(B, T, heads, kv_heads, K, dtype=torch.float32):
    generator = torch.Generator().manual_seed(T + K)
    return torch.randn(B, T, (heads + 2 * kv_heads) * K, generator=generator).to(dtype)


def outcome(qkv, heads, kv_heads, backend, base=10_000.0):
    qkv = qkv.clone().requires_grad_()
    parts = rotated_split(qkv, heads, kv_heads, base, backend=backend)
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in parts]
    loss = sum((x * w).sum() for x, w in zip(parts, weights, strict=True))
    return [*parts, *torch.autograd.grad(loss, qkv)]


@pytest.mark.parametrize(
    ("B", "T", "heads", "kv_heads", "K"),
    [(1, 1, 1, 1, 2), (2, 7, 4, 4, 32), (3, 33, 4, 2, 24), (1, 20, 3, 1, 64)],
)
def test_triton_matches_float64(B, T, heads, kv_heads, K):
    qkv = product(B, T, heads, kv_heads, K)
    expected = outcome(qkv.double(), heads, kv_heads, "reference")
    for a, b in zip(outcome(qkv, heads, kv_heads, "triton"), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=2e-6)


def test_positions_in_the_thousands_keep_their_angles():
    qkv = product(1, 5000, 1, 1, 4)
    for a, b in zip(
        outcome(qkv, 1, 1, "triton", base=37.0),
        outcome(qkv.double(), 1, 1, "reference", base=37.0),
        strict=True,
    ):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=2e-6)


def test_turns_of_a_step_are_the_rates_over_two_pi():
    found = turns_per_step(16, 10_000.0, torch.device("cpu"))
    expected = 10_000.0 ** (-torch.arange(16, dtype=torch.float64) / 16) / (2 * torch.pi)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    assert turns_per_step(1, 10_000.0, torch.device("cpu")).item() == pytest.approx(1 / (2 * torch.pi))


def test_half_precision_is_rotated_in_float32():
    qkv = product(2, 9, 2, 2, 16, torch.float16)
    actual, expected = outcome(qkv, 2, 2, "triton"), outcome(qkv.double(), 2, 2, "reference")
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == torch.float16
        torch.testing.assert_close(a.double(), b, rtol=2e-3, atol=2e-3)


def test_the_ops_pass_the_checks_of_torch_library():
    from statetrack.ops.rotary.triton import backend  # noqa: F401

    ops, qkv = torch.ops.statetrack, product(2, 5, 4, 2, 8)
    torch.library.opcheck(ops.rotated_split.default, (qkv, 4, 2, 100.0))
    parts = [x.contiguous() for x in rotated_split(qkv, 4, 2, 100.0)]
    torch.library.opcheck(ops.rotated_split_backward.default, (*parts, 100.0))


def test_second_derivatives_are_refused():
    qkv = product(1, 3, 1, 1, 4).requires_grad_()
    q, _, _ = rotated_split(qkv, 1, 1, 100.0, backend="triton")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(q.square().sum(), qkv, create_graph=True)


def test_wrong_inputs_are_explained():
    with pytest.raises(UserError, match="expected \\(batch, time, n K\\) with n = 6 heads"):
        rotated_split(torch.zeros(1, 2, 13), 4, 1, 100.0)
    with pytest.raises(UserError, match="an even K"):
        rotated_split(torch.zeros(1, 2, 9), 1, 1, 100.0)
    with pytest.raises(UserError, match="base is -1"):
        rotated_split(torch.zeros(1, 2, 12), 1, 1, -1.0)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_the_kernel_compiles_for_sm_90_without_spills(dtype, backward):
    fixed = constants(4, 4, 32) | {"BACKWARD": backward}
    warps = fixed.pop("num_warps")
    types = dict.fromkeys(("qkv", "q", "k", "v"), dtype) | {"rates": "*fp64", "rows": "i32", "T": "i32"}
    name = "statetrack.ops.rotary.triton.kernels:rotated_split_kernel"
    assert_fits(compile_sm90(name, types, fixed, warps))
