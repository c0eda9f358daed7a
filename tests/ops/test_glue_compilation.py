"""The small fused kernels compile for Hopper as they are launched, and nothing spills."""

import pytest
from sm90 import assert_fits, compile_sm90

from statetrack.ops import partial_sums
from statetrack.ops.adamw import triton_backend as adamw
from statetrack.ops.cross_entropy import triton_backend as cross_entropy
from statetrack.ops.embedding import triton_backend as embedding
from statetrack.ops.rms_norm import triton_backend as rms_norm
from statetrack.ops.short_convolution import triton_backend as short_convolution
from statetrack.ops.silu_split import triton_backend as silu_split
from statetrack.ops.swiglu import triton_backend as swiglu


def compile_as_launched(op, kernel, pointers, constants, **scalars):
    """`pointers` maps names to types, `constants` are those of the backend's plan, num_warps among them."""
    warps = constants["num_warps"]
    fixed = {name: value for name, value in constants.items() if name != "num_warps"}
    types = {name: f"*{kind}" for name, kind in pointers.items()} | scalars
    return compile_sm90(f"statetrack.ops.{op}.triton_kernels:{kernel}", types, fixed, warps)


@pytest.mark.parametrize(
    ("N", "x", "y"), [(32, "bf16", "bf16"), (128, "fp32", "bf16"), (4096, "fp32", "fp32")]
)
def test_rms_norm_compiles(N, x, y):
    constants, _, _ = rms_norm.plan(N, 17_000)
    pointers = {"x": x, "y": y, "weight": "fp32", "total": x, "out": y}
    scalars = {"rows": "i32", "eps": "fp32"}
    forward = compile_as_launched(
        "rms_norm", "forward_kernel", pointers, constants | {"HAS_Y": True}, **scalars
    )
    assert_fits(forward)
    pointers = {"s": x, "weight": "fp32", "dtotal": x, "dout": y, "dx": x, "dy": y, "dweights": "fp32"}
    flags = {"HAS_DTOTAL": True, "HAS_DY": True}
    backward = compile_as_launched(
        "rms_norm", "backward_kernel", pointers, constants | flags, **scalars, tiles="i32"
    )
    assert_fits(backward)
    # enough programs on an SM to keep memory busy
    assert forward.registers <= 64
    assert backward.registers <= 128


@pytest.mark.parametrize("W", [60, 512])
def test_swiglu_compiles(W):
    for kernel, names in (("forward_kernel", ("x", "out")), ("backward_kernel", ("x", "dout", "dx"))):
        compiled = compile_as_launched(
            "swiglu", kernel, dict.fromkeys(names, "bf16"), swiglu.constants(W), rows="i32"
        )
        assert_fits(compiled)
        assert compiled.registers <= 96


def test_silu_split_compiles():
    constants = silu_split.constants(392, [128, 128, 128, 4])
    forward, backward = ("x", "q", "k", "v", "r"), ("x", "dq", "dk", "dv", "dr", "dx")
    for kernel, names in (("forward_kernel", forward), ("backward_kernel", backward)):
        compiled = compile_as_launched(
            "silu_split", kernel, dict.fromkeys(names, "bf16"), constants, rows="i32"
        )
        assert_fits(compiled)
        assert compiled.registers <= 128


@pytest.mark.parametrize(("N", "dtype"), [(121, "bf16"), (1000, "fp32")])
def test_cross_entropy_compiles(N, dtype):
    scalars = {"rows": "i32", "stride": "i32", "ignore": "i32"}
    pointers = {"logits": dtype, "targets": "i64"}
    kernels = {
        "forward_kernel": {"sums": "fp32", "counted": "i32"},
        "backward_kernel": {"count": "i32", "dloss": "fp32", "dlogits": dtype},
    }
    for kernel, more in kernels.items():
        compiled = compile_as_launched(
            "cross_entropy", kernel, pointers | more, cross_entropy.constants(N, -(-N // 8) * 8), **scalars
        )
        assert_fits(compiled)
        assert compiled.registers <= 96
    pointers = {"sums": "fp32", "counted": "i32", "loss": "fp32", "count": "i32"}
    constants = {"BLOCK": cross_entropy.BLOCK, "num_warps": 4}
    assert_fits(compile_as_launched("cross_entropy", "mean_kernel", pointers, constants, programs="i32"))


@pytest.mark.parametrize(("V", "D", "dtype"), [(121, 128, "fp32"), (1000, 512, "bf16")])
def test_embedding_compiles(V, D, dtype):
    constants, _ = embedding.plan(17_000, V, D)
    pointers = {"tokens": "i64", "dout": dtype, "dweights": "fp32"}
    assert_fits(compile_as_launched("embedding", "backward_kernel", pointers, constants, count="i32"))
    constants = {"V": V, "D": D, "BD": 128, "BT": 16, "num_warps": 4}
    pointers = {"tokens": "i64", "weight": dtype, "out": dtype}
    assert_fits(compile_as_launched("embedding", "forward_kernel", pointers, constants, count="i32"))


@pytest.mark.parametrize(("rows", "columns"), [(528, 128), (66, 15_488)])
def test_partial_sums_compile(rows, columns):
    pointers, scalars = {"parts": "fp32", "total": "fp32"}, {"rows": "i32", "columns": "i32"}
    constants = partial_sums.constants(rows, columns)
    assert_fits(compile_as_launched("partial_sums", "add_up_kernel", pointers, constants, **scalars))


def test_adamw_compiles():
    constants = {"BLOCK": adamw.BLOCK, "num_warps": 4}
    pointers = {"table": "i64", "squares": "fp32"}
    assert_fits(compile_as_launched("adamw", "count_kernel", pointers, constants))
    pointers |= {"decays": "fp32", "rate": "fp32"}
    floats = ("clip", "beta1", "beta2", "log_beta1", "log_beta2", "eps")
    scalars = {"programs": "i32"} | dict.fromkeys(floats, "fp32")
    for parts in (512, adamw.MOST):
        assert_fits(
            compile_as_launched("adamw", "update_kernel", pointers, constants | {"PARTS": parts}, **scalars)
        )


def test_the_short_convolution_compiles():
    tile = {"L": short_convolution.L, "BC": short_convolution.CHANNELS}
    constants = tile | {"W": 4, "HAS_BIAS": True, "SILU": True, "num_warps": 4}
    pointers = {"x": "bf16", "weights": "fp32", "bias": "fp32"}
    scalars = dict.fromkeys(("T", "C", "x_b", "x_t"), "i32")
    forward = compile_as_launched(
        "short_convolution", "forward_kernel", pointers | {"y": "bf16"}, constants, **scalars
    )
    assert_fits(forward)
    pointers |= {"dy": "bf16", "dx": "bf16", "dweights": "fp32", "dbias": "fp32"}
    scalars |= {"dy_b": "i32", "dy_t": "i32"}
    assert_fits(compile_as_launched("short_convolution", "backward_kernel", pointers, constants, **scalars))


def test_the_walk_compiles():
    pointers = dict.fromkeys(("table", "letters", "states"), "i64")
    scalars = dict.fromkeys(("start", "words", "T", "n"), "i32")
    assert_fits(
        compile_as_launched("walk", "walk_kernel", pointers, {"BLOCK": 32, "num_warps": 1}, **scalars)
    )
