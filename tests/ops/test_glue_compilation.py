"""The small fused kernels compile for Hopper as they are launched, and nothing spills."""

import itertools

import pytest
from sm90 import assert_fits, compile_sm90

from statetrack.ops import partial_gradients
from statetrack.ops.adamw.triton import backend as adamw
from statetrack.ops.cross_entropy.triton import backend as cross_entropy
from statetrack.ops.embedding.triton import backend as embedding
from statetrack.ops.linear_cross_entropy.triton import backend as linear_cross_entropy
from statetrack.ops.pack.triton import backend as pack
from statetrack.ops.rms_norm.triton import backend as rms_norm
from statetrack.ops.short_convolution.triton import backend as short_convolution
from statetrack.ops.short_convolution.triton.kernels import RUNTIME
from statetrack.ops.swiglu.triton import backend as swiglu


def compile_as_launched(op, kernel, pointers, constants, file="kernels", **scalars):
    """`pointers` maps names to types, `constants` are those of the backend, num_warps among them."""
    warps = constants["num_warps"]
    fixed = {name: value for name, value in constants.items() if name != "num_warps"}
    types = {name: f"*{kind}" for name, kind in pointers.items()} | scalars
    return compile_sm90(f"statetrack.ops.{op}.triton.{file}:{kernel}", types, fixed, warps)


@pytest.mark.parametrize(
    ("N", "x", "y"), [(32, "bf16", "bf16"), (128, "fp32", "bf16"), (4096, "fp32", "fp32")]
)
def test_rms_norm_compiles(N, x, y):
    constants = rms_norm.constants(N)
    pointers = {"x": x, "y": y, "weight": "fp32", "total": x, "out": y, "inverses": "fp32"}
    scalars, from_out = {"rows": "i32", "eps": "fp32"}, {"FROM_OUT": y == "bf16"}
    forward = compile_as_launched(
        "rms_norm", "rms_norm_kernel", pointers, constants | {"HAS_Y": True} | from_out, **scalars
    )
    assert_fits(forward)
    pointers = {"s": y if y == "bf16" else x, "inverses": "fp32", "weight": "fp32", "dtotal": x}
    pointers |= {"dout": y, "dx": x, "dy": y, "dweights": "fp32"}
    flags = {"HAS_DTOTAL": True, "HAS_DY": True} | from_out
    backward = compile_as_launched(
        "rms_norm", "rms_norm_backward_kernel", pointers, constants | flags, **scalars, tiles="i32"
    )
    assert_fits(backward)
    # enough programs on an SM to keep memory busy
    assert forward.registers <= 64
    assert backward.registers <= 128


@pytest.mark.parametrize("W", [60, 2816])
def test_swiglu_compiles(W):
    forward = "swiglu_kernel", ("x", "out"), {}
    backward = [
        ("swiglu_backward_kernel", ("x", "dout", "dx"), {"OUT_AGAIN": again}) for again in (False, True)
    ]
    for kernel, names, flags in (forward, *backward):
        compiled = compile_as_launched(
            "swiglu", kernel, dict.fromkeys(names, "bf16"), swiglu.constants(W) | flags, rows="i32"
        )
        assert_fits(compiled)
        assert compiled.registers <= 96


@pytest.mark.parametrize(("N", "dtype"), [(121, "bf16"), (1000, "fp32")])
def test_cross_entropy_compiles(N, dtype):
    scalars = {"rows": "i32", "stride": "i32", "ignore_index": "i32"}
    pointers = {"logits": dtype, "targets": "i64"}
    kernels = {
        "cross_entropy_kernel": {"sums": "fp32", "counted": "i32"},
        "cross_entropy_backward_kernel": {"count": "i32", "dloss": "fp32", "dlogits": dtype},
    }
    plain = {"Z_LOSS": 0.0, "CENTRED": False, "SMOOTHING": 0.0}
    options = {"Z_LOSS": 1e-4, "CENTRED": True, "SMOOTHING": 0.1}
    for (kernel, more), flags in itertools.product(kernels.items(), (plain, options)):
        constants = cross_entropy.constants(N, -(-N // 8) * 8) | flags
        if kernel == "cross_entropy_kernel":
            del constants["CENTRED"]
        compiled = compile_as_launched("cross_entropy", kernel, pointers | more, constants, **scalars)
        assert_fits(compiled)
        assert compiled.registers <= 96
    pointers = {"sums": "fp32", "counted": "i32", "loss": "fp32", "count": "i32"}
    constants = {"BLOCK": cross_entropy.BLOCK, "num_warps": 4}
    assert_fits(compile_as_launched("cross_entropy", "mean_kernel", pointers, constants, programs="i32"))


@pytest.mark.parametrize(("N", "dtype"), [(11, "fp32"), (32_000, "bf16"), (50_280, "bf16")])
def test_the_losses_of_a_linear_read_out_compile(N, dtype):
    pointers = {"logits": dtype, "targets": "i64", "losses": "fp32"}
    scalars = {"ignore_index": "i32", "stride": "i32"}
    for gradient in (False, True):
        constants = linear_cross_entropy.constants(N) | {"GRADIENT": gradient}
        compiled = compile_as_launched(
            "linear_cross_entropy", "row_losses_kernel", pointers, constants, **scalars
        )
        assert_fits(compiled)
        assert compiled.registers <= 128


@pytest.mark.parametrize(
    ("V", "D", "dtype"), [(121, 128, "fp32"), (1000, 512, "bf16"), (32_000, 1024, "fp32")]
)
def test_embedding_compiles(V, D, dtype):
    constants, _ = embedding.backward_plan(17_000, V, D, processors=132)
    pointers = {"tokens": "i64", "dout": dtype, "dweights": "fp32"}
    assert_fits(
        compile_as_launched("embedding", "embedding_backward_kernel", pointers, constants, count="i32")
    )
    constants = {"V": V, "D": D, "BD": 128, "BT": 16, "num_warps": 4}
    pointers = {"tokens": "i64", "weight": dtype, "out": dtype}
    assert_fits(compile_as_launched("embedding", "embedding_kernel", pointers, constants, count="i32"))
    pointers = {"tokens": "i64", "order": "i64", "dout": dtype, "dweight": dtype}
    constants = embedding.sorted_constants(V, D)
    assert_fits(compile_as_launched("embedding", "sorted_backward_kernel", pointers, constants, count="i32"))


@pytest.mark.parametrize(("rows", "columns"), [(528, 128), (66, 15_488)])
def test_column_sums_compile(rows, columns):
    pointers, scalars = {"partial": "fp32", "total": "fp32"}, {"rows": "i32", "columns": "i32"}
    constants = partial_gradients.constants(rows, columns)
    compiled = compile_as_launched(
        "partial_gradients", "column_sum_kernel", pointers, constants, file="column_sum", **scalars
    )
    assert_fits(compiled)


def test_adamw_compiles():
    total = {"BLOCK": adamw.TOTAL_BLOCK, "num_warps": 8}
    assert_fits(
        compile_as_launched(
            "adamw", "total_kernel", {"squares": "fp32", "total": "fp32"}, total, programs="i32"
        )
    )
    constants = {"BLOCK": adamw.BLOCK, "num_warps": 4}
    pointers = {"table": "i64", "squares": "fp32"}
    assert_fits(compile_as_launched("adamw", "norm_kernel", pointers, constants))
    pointers |= {"decays": "fp32", "rate": "fp32"}
    floats = ("clip", "beta1", "beta2", "log_beta1", "log_beta2", "eps")
    scalars = {"programs": "i32"} | dict.fromkeys(floats, "fp32")
    for programs in (16, 512, adamw.SUMMED_BY_ALL):
        assert_fits(
            compile_as_launched("adamw", "update_kernel", pointers, constants | {"BP": programs}, **scalars)
        )


@pytest.mark.parametrize(
    ("N", "widths", "rest", "width", "bias", "packed", "split", "dtype"),
    [
        (392, [128, 128, 128], 4, 4, False, False, False, "bf16"),  # DeltaNet
        (392, [128, 128, 128], 4, 4, False, True, False, "bf16"),
        (392, [128, 128, 128], 4, 0, False, False, False, "bf16"),  # and without convolutions
        (512, [256], 256, 4, True, False, False, "bf16"),  # Mamba
        (512, [256], 256, 4, True, True, True, "bf16"),
        (2048, [2048], 0, 4, True, False, True, "bf16"),
        (2048, [2048], 0, 4, True, False, True, "fp32"),
        (376, [128, 120, 120], 4, 4, False, False, True, "bf16"),
    ],
)
def test_the_short_convolution_compiles(N, widths, rest, width, bias, packed, split, dtype):
    silu = [True] * len(widths) if width else [False, False, True]
    known = N, N, widths, rest, width, bias, silu, packed
    read = {"x": dtype, "cu_seqlens": "i32"} | dict.fromkeys(("wq", "wk", "wv", "bq", "bk", "bv"), "fp32")
    scalars = dict.fromkeys(RUNTIME, "i32")
    forward = compile_as_launched(
        "short_convolution",
        "convolution_forward_kernel",
        read | dict.fromkeys(("q", "k", "v", "r"), dtype),
        short_convolution.constants(*known, backward=False),
        **scalars,
    )
    assert_fits(forward)
    backward = compile_as_launched(
        "short_convolution",
        "convolution_backward_kernel",
        read | dict.fromkeys(("dq", "dk", "dv", "dr", "dx"), dtype) | {"partial": "fp32"},
        short_convolution.constants(*known, backward=True) | {"SPLIT": split},
        **scalars,
    )
    assert_fits(backward)
    # as many programs on an SM as there are to be
    assert 32 * forward.registers * short_convolution.LIGHT.programs <= 1.3 * 65_536
    assert 32 * backward.registers * short_convolution.size(width, True).programs <= 1.3 * 65_536


def test_the_widest_convolution_compiles():
    known = 392, 392, [128, 128, 128], 4, short_convolution.MAX_WIDTH, True, [True] * 3, False
    pointers = {"x": "bf16", "cu_seqlens": "i32"} | dict.fromkeys(
        ("wq", "wk", "wv", "bq", "bk", "bv", "partial"), "fp32"
    )
    pointers |= dict.fromkeys(("dq", "dk", "dv", "dr", "dx"), "bf16")
    constants = short_convolution.constants(*known, backward=True) | {"SPLIT": True}
    scalars = dict.fromkeys(RUNTIME, "i32")
    kernel = "convolution_backward_kernel"
    assert_fits(compile_as_launched("short_convolution", kernel, pointers, constants, **scalars))


def test_the_automaton_run_compiles():
    pointers = dict.fromkeys(("table", "letters", "states"), "i64")
    scalars = dict.fromkeys(("start", "words", "T", "num_states"), "i32")
    assert_fits(
        compile_as_launched(
            "automaton_run", "run_automaton_kernel", pointers, {"BLOCK": 32, "num_warps": 1}, **scalars
        )
    )


def test_pack_compiles():
    constants, scalars = pack.constants(39), {"ignore": "i32", "B": "i32"}
    first = dict.fromkeys(("targets", "lengths", "answers"), "i64")
    assert_fits(compile_as_launched("pack", "lengths_kernel", first, constants, **scalars))
    second = dict.fromkeys(("inputs", "lengths", "ends", "tokens", "at", "answers"), "i64") | {
        "bounds": "i32"
    }
    scalars |= {"fillers": "i32", "rows": "i32"}
    assert_fits(compile_as_launched("pack", "pack_kernel", second, constants, **scalars))
