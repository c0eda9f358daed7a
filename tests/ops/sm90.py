"""Compile a Triton kernel for Hopper (sm_90) or another GPU, on a machine without one, and read what it
costs.

Compilation runs in a process of its own: under pytest this one has Triton's interpreter switched on.
"""

import atexit
import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass

# Reads a kernel per line and answers with a line: ["usage", report, shared memory] or ["error", traceback].
WORKER = """
import importlib, json, pathlib, subprocess, sys, tempfile, traceback
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def usage(name, types, constants, options, capability):
    module, function = name.split(":")
    kernel = getattr(importlib.import_module(module), function)
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types if types[name][0] == "*"},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tools = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return ["usage", report, compiled.metadata.shared]

for line in sys.stdin:
    try:
        answer = usage(*json.loads(line))
    except Exception:
        answer = ["error", traceback.format_exc()]
    print("ANSWER", json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Compiled:
    registers: int  # per thread
    stack: int  # bytes of the stack per thread, which spilled registers take
    local: int  # bytes of other local memory per thread
    shared: int  # bytes per program


def compile_sm90(
    kernel: str,
    types: dict[str, str],
    constants: dict,
    num_warps: int,
    num_stages: int = 3,
    registers: int | None = None,
    capability: int = 90,
) -> Compiled:
    """Compile `kernel`, given as "module:function".

    `types` names every run-time argument ("*fp32", "*bf16", "i32", "fp32", ...); pointers count as aligned
    to 16 bytes, as torch allocates them. `constants` names every constexpr, `registers` the limit per
    thread, if there is one. `capability` is 10 times that of the GPU: 90 for Hopper, 89 for Ada.
    """
    options = {"num_warps": num_warps, "num_stages": num_stages}
    options |= {"maxnreg": registers} if registers else {}
    worker = _worker()
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps([kernel, types, constants, options, capability]) + "\n")
    worker.stdin.flush()
    answer = next((line for line in worker.stdout if line.startswith("ANSWER ")), None)
    if answer is None:
        _worker.cache_clear()
        raise RuntimeError(f"{kernel} ended the compiler, with exit code {worker.wait()}.")
    kind, report, *shared = json.loads(answer.removeprefix("ANSWER "))
    if kind == "error":
        raise RuntimeError(f"{kernel} does not compile for sm_{capability}:\n{report[-3000:]}")
    usage = {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", report)}
    return Compiled(usage["REG"], usage["STACK"], usage["LOCAL"], shared[0])


@functools.cache
def _worker() -> subprocess.Popen:
    """The compiler's process: one for all kernels, because importing takes longer than compiling most."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WORKER]
    worker = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(worker.kill)
    return worker


def assert_fits(compiled: Compiled, spilled: int = 0) -> None:
    """No register spilled, or no more than these bytes; no more shared memory than Ampere and Ada have."""
    assert compiled.registers < 256, compiled
    assert compiled.stack <= spilled, compiled
    assert compiled.local == 0, compiled
    assert compiled.shared <= 99 * 1024, compiled
