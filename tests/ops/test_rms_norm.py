"""RMS normalisation, alone and of a sum: both backends are one function, forward and every gradient."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops.rms_norm import add_rms_norm, rms_norm

WIDTHS = [(1, 24), (3, 60), (33, 128), (5, 200), (130, 32), (2, 3000)]


def inputs(rows=33, N=128, dtype=torch.float32, y_dtype=None):
    generator = torch.Generator().manual_seed(rows + N)
    x = torch.randn(rows, N, generator=generator).to(dtype)
    weight = 1 + 0.3 * torch.randn(N, generator=generator)
    y = None if y_dtype is None else torch.randn(rows, N, generator=generator).to(y_dtype)
    return x, y, weight


def outcome(given, **options):
    """The results and every gradient for a fixed random loss of both results."""
    x, y, weight = (None if z is None else z.clone().requires_grad_() for z in given)
    if y is None:
        results = (rms_norm(x, weight, **options),)
    else:
        results = add_rms_norm(x, y, weight, **options)
    generator = torch.Generator().manual_seed(1)
    sum((z.float() * torch.randn(z.shape, generator=generator)).sum() for z in results).backward()
    return [z.detach() for z in results] + [z.grad for z in (x, y, weight) if z is not None]


def assert_same(given, tolerance=1e-5, **options):
    wide = [None if z is None else z.float() for z in given]
    ours, theirs = outcome(given, backend="triton", **options), outcome(wide, backend="reference")
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance * 10)


def test_a_row_of_equal_values_becomes_the_weight():
    weight = torch.linspace(-1, 1, 24)
    torch.testing.assert_close(rms_norm(torch.full((2, 24), 7.0), weight), weight.expand(2, 24))


@pytest.mark.parametrize(("rows", "N"), WIDTHS)
def test_triton_matches_the_reference(rows, N):
    assert_same(inputs(rows, N))


@pytest.mark.parametrize(("rows", "N"), WIDTHS)
def test_triton_matches_the_reference_on_sums(rows, N):
    assert_same(inputs(rows, N, y_dtype=torch.float32))


def test_triton_takes_and_gives_half_precision():
    assert_same(inputs(dtype=torch.float16), 2e-3)
    assert_same(inputs(dtype=torch.float32, y_dtype=torch.float16), 2e-3)
    assert_same(inputs(dtype=torch.float32, y_dtype=torch.float16), 2e-3, out_dtype=torch.float16)
    x, y, weight = inputs(y_dtype=torch.float16)
    total, out = add_rms_norm(x, y, weight, out_dtype=torch.float16, backend="triton")
    assert (total.dtype, out.dtype) == (torch.float32, torch.float16)
    assert rms_norm(x.half(), weight, out_dtype=torch.float32, backend="triton").dtype == torch.float32


@pytest.fixture
def from_the_output(monkeypatch):
    """The backward reads the output, as it does of large tensors in bfloat16, which the interpreter lacks."""
    from statetrack.ops.rms_norm.triton import backend as triton_backend

    monkeypatch.setattr(triton_backend, "FROM_OUT", torch.float32)
    monkeypatch.setattr(triton_backend, "FROM_OUT_VALUES", 0)


@pytest.mark.parametrize(("rows", "N"), WIDTHS)
@pytest.mark.parametrize("y_dtype", [None, torch.float32])
def test_a_backward_that_reads_the_output_matches_the_reference(from_the_output, rows, N, y_dtype):
    assert_same(inputs(rows, N, y_dtype=y_dtype))


def test_a_backward_that_reads_the_output_takes_weights_of_zero(from_the_output):
    x, y, weight = inputs(y_dtype=torch.float32)
    weight[3], weight[7] = 0.0, -1e-20
    assert_same((x, y, weight))


def test_a_backward_that_reads_the_output_does_not_keep_the_sum(from_the_output):
    x, y, weight = (z.requires_grad_() for z in inputs(y_dtype=torch.float32))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda z: kept.append(z.data_ptr()) or z, lambda z: z):
        total, out = add_rms_norm(x, y, weight, backend="triton")
    assert out.data_ptr() in kept
    assert total.data_ptr() not in kept


def test_only_large_tensors_in_bfloat16_have_a_backward_that_reads_the_output():
    from statetrack.ops.rms_norm.triton.backend import reads_result

    large = torch.empty(16, 2048, 1024, device="meta")
    assert reads_result(large, torch.bfloat16)
    assert not reads_result(large, torch.float32)
    assert not reads_result(large[:, :256], torch.bfloat16)


def test_many_tiles_per_program_are_one_sum(monkeypatch):
    from statetrack.ops.rms_norm.triton import backend as triton_backend

    monkeypatch.setattr(triton_backend, "PROGRAMS_PER_PROCESSOR", 2)
    assert triton_backend.backward_grid(70, 16, processors=1) == (2, 3)
    assert_same(inputs(rows=70, N=128, y_dtype=torch.float32))


@pytest.mark.parametrize(("processors", "programs", "tiles"), [(132, 528, 3), (28, 106, 15)])
def test_the_backward_has_up_to_four_programs_per_multiprocessor(processors, programs, tiles):
    from statetrack.ops.rms_norm.triton import backend as triton_backend

    assert triton_backend.backward_grid(16 * 3 * 528, 16, processors) == (programs, tiles)


def test_with_nothing_to_add_both_gradients_still_meet():
    given = inputs(rows=33, N=60)
    found = {}
    for backend in ("reference", "triton"):
        x, _, weight = (None if z is None else z.clone().requires_grad_() for z in given)
        total, out = add_rms_norm(2 * x, None, weight, backend=backend)
        (total.sin().sum() + out.square().sum()).backward()
        found[backend] = [total.detach(), x.grad, weight.grad]
    for a, b in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", [0, 1])
def test_either_result_may_go_unused(used):
    given = inputs(rows=3, N=24, y_dtype=torch.float32)
    found = {}
    for backend in ("reference", "triton"):
        leaves = [z.clone().requires_grad_() for z in given]
        add_rms_norm(*leaves, backend=backend)[used].square().sum().backward()
        found[backend] = [torch.zeros_like(z) if z.grad is None else z.grad for z in leaves]
    for a, b in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(a, b)


def test_the_ops_pass_the_checks_of_torch_library():
    from statetrack.ops.rms_norm.triton import backend as triton_backend  # noqa: F401

    x, y, weight = (z.requires_grad_() for z in inputs(3, 24, y_dtype=torch.float32))
    ops = torch.ops.statetrack
    torch.library.opcheck(ops.rms_norm.default, (x.detach(), weight.detach(), 1e-5, torch.float16))
    torch.library.opcheck(ops.add_rms_norm.default, (x, y, weight, 1e-5, torch.float32))
    torch.library.opcheck(ops.add_rms_norm.default, (x, y.detach().half(), weight, 1e-5, torch.float16))


def test_second_derivatives_are_refused():
    x, y, weight = (z.requires_grad_() for z in inputs(3, 24, y_dtype=torch.float32))
    for out in (rms_norm(x, weight, backend="triton"), add_rms_norm(x, y, weight, backend="triton")[1]):
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(out.square().sum(), x, create_graph=True)


def test_wrong_inputs_are_explained():
    x, y, weight = inputs(3, 24, y_dtype=torch.float32)
    with pytest.raises(UserError, match="weight has shape"):
        rms_norm(x, weight[:20])
    with pytest.raises(UserError, match="y has shape"):
        add_rms_norm(x, y[:2], weight)
    with pytest.raises(UserError, match="more than 4096"):
        rms_norm(torch.ones(1, 5000), torch.ones(5000), backend="triton")
    with pytest.raises(UserError, match="float64"):
        rms_norm(x.double(), weight, backend="triton")
