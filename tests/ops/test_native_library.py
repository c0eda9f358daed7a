"""The native library as a whole: threads, forks, instruction sets, and what happens where it is absent."""

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.gated_linear_attention import gated_linear_attention
from statetrack.ops.native import library
from statetrack.ops.selective_scan import selective_scan
from statetrack.ops.short_convolution import short_convolution

built = pytest.mark.skipif(library.ABSENT is not None, reason="the native library was not built")
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler")
def test_it_is_there_wherever_there_is_a_compiler():
    """Else a broken build would skip every other test of it."""
    assert library.ABSENT is None or "no AVX2" in library.ABSENT


def results():
    """Outputs and gradients of the native ops, at sizes that several threads share."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, u, delta = (torch.randn(3, 70, 4, 32, generator=generator) for _ in range(5))
    beta, weights = torch.rand(3, 70, 4, generator=generator), torch.randn(3, 16, 70, generator=generator)
    u, delta = (x.flatten(2).mT for x in (u, delta.square()))
    inputs = [x.requires_grad_() for x in (q, k, v, beta)]
    o, _ = delta_rule(*inputs, use_qk_l2norm_in_kernel=True, backend="native")
    A = -torch.arange(1.0, 17).repeat(128, 1)
    scanned = [x.requires_grad_() for x in (u, delta, A, weights)]
    y = selective_scan(u, delta, A, weights, weights, eigenvalues="[-1,1]", backend="native")
    gated = [gated_linear_attention(q, k, v, a=a, backend="native")[0] for a in (beta - 1, k.sin())]
    channels, _ = delta_rule(*inputs, a=v.cos(), use_qk_l2norm_in_kernel=True, backend="native")
    taps = torch.randn(32, 8, generator=generator).requires_grad_()
    packed = {"cu_seqlens": torch.tensor([0, 1, 300, 300, 840]), "backend": "native"}
    convolved = [
        short_convolution(q.view(4, 210, 32), taps[:, :4], silu=True, backend="native"),
        short_convolution(k.view(1, 840, 32), taps, taps[:, 0], silu=True, **packed),
    ]
    outputs = [o, y, *gated, channels, *convolved]
    gradients = torch.autograd.grad(sum(x.square().sum() for x in outputs), [*inputs, *scanned, taps])
    return [*(x.detach() for x in outputs), *gradients]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def same(actual, expected):
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@built
def test_any_number_of_threads_gives_the_same_bits(two_threads):
    expected = results()
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        assert same(results(), expected)


@built
def test_several_python_threads_may_call_at_once(two_threads):
    expected = results()
    with ThreadPoolExecutor(4) as pool:
        assert all(same(x, expected) for x in pool.map(lambda _: results(), range(8)))


@built
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_works_and_does_not_wait_for_threads_it_lost(two_threads):
    torch.ones(1 << 20).exp_()  # PyTorch's own threads are running by now
    inputs = [torch.randn(4, 70, 4, 32) for _ in range(3)] + [torch.rand(4, 70, 4)]
    expected = delta_rule(*inputs, backend="native")[0]
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs ends by this signal
        # compared in numpy: an operation of PyTorch on two threads would hang here
        os._exit(0 if (delta_rule(*inputs, backend="native")[0].numpy() == expected.numpy()).all() else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0


@built
@pytest.mark.parametrize("number", [1, 2])
def test_every_instruction_set_gives_the_same_to_rounding(number, tmp_path):
    expected = results()
    code = f"import sys, torch; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    code += "from statetrack.ops.native import library; from test_native_library import results\n"
    code += f"torch.save([library.INSTRUCTIONS, results()], {str(tmp_path / 'results.pt')!r})"
    run_python(code, {"STATETRACK_NATIVE_SET": str(number)})
    instructions, actual = torch.load(tmp_path / "results.pt")
    assert instructions == "portable" or number == 1
    for x, y in zip(actual, expected, strict=True):
        assert (x - y).norm() < 1e-5 * y.norm()


def run_python(code, environment=()):
    command = [sys.executable, "-W", "error", "-c", code]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment)
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True)


ABSENT = """
from pathlib import Path
import torch
import statetrack.ops.native
statetrack.ops.native.FILE = Path("nowhere.so")
from statetrack import delta_rule
from statetrack.ops.selective_scan import selective_scan
x = torch.randn(1, 5, 2, 4, requires_grad=True)
for _ in range(2):
    print(delta_rule(x, x, x, x[..., 0].sigmoid())[0].grad_fn.name())
    print(type(selective_scan(x[0], x[0], -x[0, 0, :, :2].exp(), x[0], x[0]).grad_fn).__name__)
try:
    delta_rule(x, x, x, x[..., 0], backend="native")
except ValueError as error:
    print(error)
"""


def test_where_it_is_absent_the_slower_backend_serves_and_says_so_once():
    result = run_python(ABSENT)
    assert result.stderr.splitlines() == [
        "statetrack: the native CPU backend was not built (the package was not installed); "
        "the slower PyTorch one serves. Install a C++17 compiler and reinstall."
    ]
    assert result.stdout.count("_ChunkedBackward") == 4
    assert (
        'delta_rule: backend "native" cannot run this: the native CPU backend was not built' in result.stdout
    )


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "no-such-compiler"), ("false", "false failed at install")]
)
def test_a_build_that_fails_leaves_its_reason_instead_of_an_error(compiler, reason, tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    command += [f"--build-lib={tmp_path / 'lib'}", f"--build-temp={tmp_path / 'temp'}"]
    environment = os.environ | {"CXX": compiler}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    folder = tmp_path / "lib" / "statetrack" / "ops" / "native"
    assert [path.name for path in folder.iterdir()] == ["not_built.txt"]
    with pytest.raises(OSError, match=reason):
        library.load(folder / "libstatetrack.so")
