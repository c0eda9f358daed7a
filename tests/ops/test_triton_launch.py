"""What a repeated call skips: Triton's own launcher, checks and choices; and when it must not."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton import knobs

from statetrack.errors import UserError
from statetrack.ops import call_cache
from statetrack.ops.backends import prefers_triton
from statetrack.ops.call_cache import CallCache, signature
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.selective_scan import selective_scan
from statetrack.ops.triton_runtime import launcher
from statetrack.ops.triton_runtime.compile_ahead import compile_ahead
from statetrack.ops.triton_runtime.launcher import Launcher


class StandIn:
    """A kernel that only writes down how it was launched; `compiled` launches go past Triton's launcher."""

    def __init__(self):
        self.launched = []
        self.compiled = SimpleNamespace(function=7, packed_metadata=(4, 1, 0), run=self.run)

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            self.launched.append(("triton", grid, arguments, num_warps))
            return self.compiled

        return launch

    def run(self, *arguments):
        self.launched.append(("compiled", *arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launcher, "_current_device", lambda: -1)
    monkeypatch.setattr(launcher, "_current_stream", lambda device: 99)
    return StandIn()


def names(kernel):
    return [name for name, *_ in kernel.launched]


def test_the_second_call_starts_the_compiled_kernel_on_the_current_stream(kernel):
    launch = Launcher(kernel, -1, (5, 6), (3, 0.5), (True,), warps=4)
    x, y = torch.zeros(4), torch.zeros(4)
    launch(x, y)
    launch(x, y)
    assert kernel.launched == [
        ("triton", (5, 6), (x, y, 3, 0.5, True), 4),
        ("compiled", 5, 6, 1, 99, 7, (4, 1, 0), None, None, None, x.data_ptr(), y.data_ptr(), 3, 0.5, True),
    ]


def test_pointers_triton_compiled_for_are_told_from_others(kernel):
    launch, x = Launcher(kernel, -1, (1, 1), (), (), warps=1), torch.zeros(8)
    for tensor in (x[1:], x, x[1:], x):
        launch(tensor)
    assert names(kernel) == ["triton", "triton", "triton", "compiled"]


def test_other_numbers_of_the_same_kind_need_no_other_kernel(kernel):
    x = torch.zeros(8)
    for number in (32, 48, 3, 5, 1, 1 << 40):
        Launcher(kernel, -1, (1, 1), (number,), (), warps=1)(x)
    assert names(kernel) == ["triton", "compiled", "triton", "compiled", "triton", "triton"]
    Launcher(kernel, -1, (1, 1), (48,), (), warps=1)(x.half())
    Launcher(kernel, -1, (1, 1), (48,), (True,), warps=1)(x)
    assert names(kernel)[-2:] == ["triton", "triton"]


def test_other_devices_versions_and_hooks_go_through_triton(kernel, monkeypatch):
    launch, x = Launcher(kernel, -1, (1, 1), (), (), warps=1), torch.zeros(8)
    launch(x)
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "_current_device", lambda: 1)
        launch(x)
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
        launch(x)
    monkeypatch.setattr(launcher, "_known", False)
    unknown = Launcher(kernel, -1, (1, 1), (), (), warps=2)
    unknown(x)
    unknown(x)
    assert set(names(kernel)) == {"triton"}


@pytest.fixture
def facts_from(tmp_path):
    """What a script of this folder prints, line by line; its kernels go to a driver that only looks."""
    if shutil.which("gcc") is None or torch.cuda.is_available():
        pytest.skip("needs a C compiler; tests/gpu/test_launch_gpu.py has a real driver")
    here, include = Path(__file__).parent, Path(triton.__file__).parent / "backends/nvidia/include"
    library = tmp_path / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{include}"]
    subprocess.run([*command, str(here / "cuda_stand_in.c"), "-o", str(library)], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")

    def run(script):
        command = [sys.executable, str(here / script)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return list(map(json.loads, result.stdout.splitlines()))

    return run


def test_the_driver_is_asked_for_the_same_launch_both_ways(facts_from):
    """Through Triton's own C code."""
    first, second, pointers = facts_from("launch_twice.py")
    (half,) = struct.unpack("I", struct.pack("f", 0.5))
    assert first["launched"] == second["launched"]
    grid, (threads, _, stream, function), arguments = (
        second["launched"][i:j] for i, j in ((0, 3), (3, 7), (7, 12))
    )
    assert (grid, threads, stream, function) == ([5, 6, 1], 64, 99, 3)
    assert arguments == [*pointers, 7, 1 << 40, half]
    assert (first["asked"], second["asked"]) == (2, 0)


def test_kernels_of_both_directions_are_compiled_in_threads_and_launched_later(facts_from):
    ahead, after, broken, interrupted = facts_from("compile_then_launch.py")
    assert ahead == {"compiled": 2, "main": False, "loaded": 2, "launched": False}
    assert after == {"compiled": 2, "loaded": 2, "launched": True}
    assert broken == {"error": "CompileTimeAssertionFailure"}  # where it is launched, not before
    assert interrupted == {"ahead": None, "grid": 3, "asked": 2}  # launched like any other


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there")
def test_nothing_is_done_ahead_where_kernels_are_interpreted():
    compile_ahead(pytest.fail)


def test_a_memory_makes_once_per_key_and_forgets_when_full(monkeypatch):
    monkeypatch.setattr(call_cache, "CAPACITY", 2)
    memory, made = CallCache(), []
    for key in ("a", "a", None, None, "b", "c", "a"):
        memory.get_or_make(key, lambda key=key: made.append(key) or key)
    assert made == ["a", None, None, "b", "c", "a"]


def test_a_signature_tells_shapes_and_dtypes_apart_and_needs_plain_tensors():
    x = torch.zeros(2, 3)
    assert signature(x, None) == signature(torch.ones(2, 3), None)
    others = (x.mT, x.double(), x[:1], x.to("meta"))
    assert signature(x) not in [signature(other) for other in others]
    assert signature(x, "three") is None
    with torch._subclasses.FakeTensorMode():
        assert signature(torch.zeros(2, 3)) is None


def test_a_wrong_shape_is_refused_however_often_and_next_to_right_ones():
    q, beta = torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2)
    for _ in range(2):
        delta_rule(q, q, q, beta)
        with pytest.raises(UserError, match="beta has shape"):
            delta_rule(q, q, q, beta.mT)
        with pytest.raises(UserError, match=r"householders is 1\.0"):
            delta_rule(q, q, q, beta, householders=1.0)  # equal to 1, and no whole number


def test_the_environment_still_chooses_after_a_first_call(monkeypatch):
    u, A, B = torch.ones(1, 2, 3), -torch.ones(2, 1), torch.ones(1, 1, 3)
    selective_scan(u, u, A, B, B)
    monkeypatch.setenv("STATETRACK_BACKEND", "fastest")
    with pytest.raises(UserError, match="STATETRACK_BACKEND"):
        selective_scan(u, u, A, B, B)


@pytest.mark.parametrize(("backend", "preferred"), [("auto", True), ("triton", True), ("reference", False)])
def test_triton_is_preferred_unless_the_environment_names_another_backend(backend, preferred, monkeypatch):
    monkeypatch.setenv("STATETRACK_BACKEND", backend)
    assert prefers_triton(torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu")) is preferred
