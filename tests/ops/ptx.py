"""A CPU stand-in for the part of Triton that the split-bfloat16 products use, down to inline PTX.

Triton's interpreter has no bfloat16 arithmetic and no inline assembly, so there these kernels bypass the
digits. `on_cpu` runs the same Python source on torch tensors instead, with the PTX text carried out
instruction by instruction.
"""

import re
import types

import numpy as np
import torch


def round_to_bfloat16(bits):
    """cvt.rn: float32 bits -> bfloat16 bits, to nearest, ties to even; overflow gives infinity."""
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(bits.view(np.float32)), 0x7FFF, rounded).astype(np.uint32)


def floats(bits):
    return bits.view(np.float32)


def bits(values):
    """Of float32 numbers; denormal ones are zero, as instructions with .ftz have it."""
    return np.where(np.abs(values) < 2.0**-126, np.float32(0), values).astype(np.float32).view(np.uint32)


def number(text):
    """A constant of PTX: 0f and the bits of a float32, or an integer."""
    return np.asarray(int(text[2:], 16) if text.startswith("0f") else int(text, 0), np.uint32)


INSTRUCTIONS = {
    # the first operand goes to the upper half
    "cvt.rn.bf16x2.f32": lambda a, b: round_to_bfloat16(a) << np.uint32(16) | round_to_bfloat16(b),
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "sub.f32": lambda a, b: (floats(a) - floats(b)).astype(np.float32).view(np.uint32),
    "mov.b32": lambda a: a,
    "mul.ftz.f32": lambda a, b: bits(floats(a) * floats(b)),
    "add.ftz.f32": lambda a, b: bits(floats(a) + floats(b)),
    "ex2.approx.ftz.f32": lambda a: bits(np.exp2(floats(a))),
    "rcp.approx.ftz.f32": lambda a: bits(np.float32(1) / floats(a)),
}


def carry_out(text, outputs, inputs):
    """Run PTX on 32-bit registers: $0, $1, ... are the outputs and then the inputs. Returns the outputs."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    for line in re.findall(r"[^;{}]+(?=;)", text):
        name, _, operands = line.strip().partition(" ")
        if name == ".reg":
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[s] if s in registers else number(s) for s in sources]
        registers[target] = INSTRUCTIONS[name](*values)
    return [registers[f"${i}"] for i in range(outputs)]


def inline_asm_elementwise(text, constraints, arguments, dtype, is_pure, pack):
    """Two float32 elements at a time in, packed bfloat16 pairs out: element 0 of a pair in the lower half."""
    text = getattr(text, "value", text)
    kinds = constraints.split(",")
    outputs = [kind for kind in kinds if kind.startswith("=")]
    # an output is written while inputs are still needed, so it must not share their register
    assert set(outputs) == {"=&r"}
    assert pack == 2
    (x,) = arguments
    assert len(kinds) - len(outputs) == pack
    assert all(d == torch.bfloat16 for d in dtype)
    assert len(dtype) == len(outputs)
    pairs = x.contiguous().numpy().view(np.uint32).reshape(-1, 2)
    with np.errstate(over="ignore", invalid="ignore"):
        found = carry_out(text, len(outputs), [pairs[:, 0].copy(), pairs[:, 1].copy()])
    halves = [np.stack([d & 0xFFFF, d >> 16], 1).astype(np.uint16).view(np.int16) for d in found]
    return tuple(torch.from_numpy(h.copy()).view(torch.bfloat16).view(x.shape) for h in halves)


class Dot:
    """Products of bfloat16 tiles, exact, summed in float32 as tensor cores do; counts how many there were."""

    def __init__(self):
        self.count = 0

    def __call__(self, x, y, total=None):
        assert x.dtype == y.dtype == torch.bfloat16, "tensor cores take bfloat16 digits"
        self.count += 1
        product = (x.double() @ y.double()).float()
        return product if total is None else total + product


def on_cpu(module):
    """The module's jitted functions by name, on torch tensors, and the counter of their products."""
    dot = Dot()
    language = types.SimpleNamespace(
        arange=torch.arange,
        where=lambda c, a, b: torch.where(c, torch.as_tensor(a), torch.as_tensor(b)),
        trans=lambda x: x.T.contiguous(),
        dot=dot,
        static_range=range,
        bfloat16=torch.bfloat16,
        float32=torch.float32,
        constexpr=None,
        inline_asm_elementwise=inline_asm_elementwise,
    )
    space = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    space |= {"tl": language, "__builtins__": __builtins__}
    functions = {
        name: types.FunctionType(value.fn.__code__, space, name, value.fn.__defaults__)
        for name, value in space.items()
        if hasattr(value, "fn") and hasattr(value.fn, "__code__")
    }
    space |= functions
    return functions, dot
