"""The norm of heads, with skip and gate and without: both backends are one function, with every gradient."""

import pytest
import torch
from sm90 import assert_fits, compile_sm90

from statetrack.errors import UserError
from statetrack.ops.head_norm import head_norm
from statetrack.ops.head_norm.triton import backend as triton_backend

SHAPES = [((1,), 1, 16), ((2, 5), 3, 24), ((70,), 2, 64), ((9,), 1, 128)]


def inputs(shape, H, D, gated, dtype=torch.float32):
    """h, weight, and with `gated` skip, c and z, z a part of wider rows."""
    generator = torch.Generator().manual_seed(D)
    h = (1 + torch.randn(*shape, H, D, generator=generator)).to(dtype)
    weight, skip = torch.randn(2, H * D, generator=generator)
    c = torch.randn(*shape, H * D, generator=generator).to(dtype)
    up = torch.randn(*shape, 2 * H * D, generator=generator).to(dtype)
    return (h, weight, skip, c, up) if gated else (h, weight)


def outcome(given, backend, **options):
    leaves = [x.clone().requires_grad_() for x in given]
    branches = {}
    if len(leaves) > 2:
        skip, c, up = leaves[2:]
        branches = {"skip": skip, "c": c, "z": up[..., c.shape[-1] :]}
    y = head_norm(*leaves[:2], **branches, backend=backend, **options)
    (
        y.to(given[1].dtype) * torch.linspace(-1, 1, y.numel(), dtype=given[1].dtype).view_as(y)
    ).sum().backward()
    return [y.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("shape", "H", "D"), SHAPES)
def test_triton_matches_float64(shape, H, D, gated):
    given = inputs(shape, H, D, gated)
    expected = outcome([x.double() for x in given], "reference")
    for a, b in zip(outcome(given, "triton"), expected, strict=True):
        assert (a - b).abs().max() <= 2e-5 * (1 + b.abs().max())


@pytest.mark.parametrize("gated", [False, True])
def test_triton_takes_and_gives_half_precision(gated):
    given = inputs((33,), 2, 32, gated, torch.float16)
    actual = outcome(given, "triton", out_dtype=torch.float16)
    assert [x.dtype for x in actual[:3]] == [torch.float16, torch.float16, torch.float32]
    for a, b in zip(actual, outcome([x.double() for x in given], "reference"), strict=True):
        assert (a - b).norm() <= 2e-3 * b.norm()


def test_many_tiles_per_program_are_one_sum(monkeypatch):
    monkeypatch.setattr(triton_backend, "PROGRAMS_PER_PROCESSOR", 1)
    given = inputs((100,), 1, 64, True)
    expected = outcome([x.double() for x in given], "reference")
    for a, b in zip(outcome(given, "triton"), expected, strict=True):
        assert (a - b).abs().max() <= 2e-5 * (1 + b.abs().max())


def test_rows_at_uneven_distances_are_copied():
    h, weight, skip, c, up = inputs((4, 6), 2, 16, True)
    uneven = up[:, :5, 32:]
    given = h[:, :5], weight
    options = {"skip": skip, "c": c[:, :5], "z": uneven}
    torch.testing.assert_close(
        head_norm(*given, **options, backend="triton"), head_norm(*given, **options, backend="reference")
    )


def test_single_steps_and_single_rows_are_taken():
    for shape in ((), (3, 1), (1, 4)):
        h, weight, skip, c, up = inputs(shape, 2, 16, True)
        options = {"skip": skip, "c": c, "z": up[..., 32:]}
        torch.testing.assert_close(
            head_norm(h, weight, **options, backend="triton"),
            head_norm(h, weight, **options, backend="reference"),
        )


def test_the_ops_pass_the_checks_of_torch_library():
    h, weight, skip, c, up = inputs((5,), 2, 16, True)
    z, op = up[..., 32:], torch.ops.statetrack.head_norm.default
    torch.library.opcheck(op, (h, weight, skip, c, z, 1e-5, torch.float16))
    torch.library.opcheck(op, (h, weight, None, None, None, 1e-5, torch.float32))


def test_second_derivatives_are_refused():
    h, weight = (x.requires_grad_() for x in inputs((5,), 2, 16, False))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(head_norm(h, weight, backend="triton").sum(), h, create_graph=True)


def test_wrong_inputs_are_explained():
    h, weight, skip, c, up = inputs((5,), 2, 16, True)
    with pytest.raises(UserError, match="expected all of them or none"):
        head_norm(h, weight, skip=skip, c=c)
    with pytest.raises(UserError, match="z has shape"):
        head_norm(h, weight, skip=skip, c=c, z=up)
    with pytest.raises(UserError, match="weight has shape"):
        head_norm(h, weight[:3])


@pytest.mark.parametrize(
    ("D", "gated", "dtype"), [(32, False, "*fp32"), (64, True, "*bf16"), (128, True, "*bf16")]
)
def test_the_kernels_compile_for_sm_90_without_spills(D, gated, dtype):
    constants = triton_backend.constants(D) | {"GATED": gated}
    warps, module = constants.pop("num_warps"), "statetrack.ops.head_norm.triton.kernels"
    parameters = dict.fromkeys(("weight", "skip", "partial"), "*fp32")
    numbers = dict.fromkeys(("rows", "H", "c_stride", "z_stride"), "i32") | {"eps": "fp32"}
    for kernel in ("head_norm_kernel", "head_norm_backward_kernel"):
        names = (
            ("h", "c", "z", "y") if kernel == "head_norm_kernel" else ("h", "c", "z", "dy", "dh", "dc", "dz")
        )
        given = dict(parameters)
        if kernel == "head_norm_kernel":
            del given["partial"]
        types = given | dict.fromkeys(names, dtype) | numbers
        assert_fits(compile_sm90(f"{module}:{kernel}", types, constants, warps))
