"""Inputs of several dtypes, as autocast and hand-written code mix them: every backend, one answer."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.gated_linear_attention import gated_linear_attention
from statetrack.ops.generalised_delta_rule import generalised_delta_rule
from statetrack.ops.mlstm import mlstm
from statetrack.ops.native import library
from statetrack.ops.selective_scan import selective_scan
from statetrack.ops.short_convolution import short_convolution
from statetrack.ops.slstm import slstm

B, T, H, K, V, D = 2, 20, 2, 4, 3, 32


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def decay(*shape):
    return -normal(*shape).abs()


ROWS = {"q": normal(B, T, H, K), "k": 0.5 * normal(B, T, H, K, seed=1), "v": normal(B, T, H, V)}
STATE = {"initial_state": normal(B, H, K, V)}
SCAN = {"u": normal(B, D, T), "delta": normal(B, D, T, seed=1).abs(), "A": decay(D, K)}
SCAN |= {"B": normal(B, K, T), "C": normal(B, K, T, seed=1), "D": normal(D), "z": normal(B, D, T, seed=2)}
SCAN |= {"delta_bias": normal(D).abs(), "initial_state": normal(B, D, K)}
OPS = {
    "delta_rule": (delta_rule, ROWS | STATE | {"beta": normal(B, T, H).sigmoid(), "g": decay(B, T, H)}),
    "delta_rule, channels": (
        delta_rule,
        ROWS | STATE | {"beta": normal(B, T, H).sigmoid(), "g": decay(B, T, H, K)},
    ),
    "gated_linear_attention": (gated_linear_attention, ROWS | STATE | {"a": decay(B, T, H, K).exp()}),
    "generalised_delta_rule": (
        generalised_delta_rule,
        ROWS | STATE | {"w": decay(B, T, H, K).exp(), "a": ROWS["k"], "b": ROWS["k"]},
    ),
    "selective_scan": (selective_scan, SCAN),
    "mlstm": (mlstm, ROWS | {"i": normal(B, T, H), "f": normal(B, T, H, seed=1)}),
    "slstm": (
        slstm,
        {"x": normal(B, T, H, 4, K), "R": normal(H, K, 4 * K) / 4, "bias": normal(H, 4, K)},
    ),
    "short_convolution": (
        short_convolution,
        {"x": normal(B, T, D), "weight": normal(D, 3), "bias": normal(D), "initial_state": normal(B, D, 2)},
    ),
}
BACKENDS = {"generalised_delta_rule": ["reference"], "mlstm": ["reference", "chunked"]}
BACKENDS |= {"slstm": BACKENDS["mlstm"], "short_convolution": ["reference"]}
RESULT = {"delta_rule": "v", "delta_rule, channels": "v", "gated_linear_attention": "v", "mlstm": "v"}
RESULT |= {"generalised_delta_rule": "v", "selective_scan": "u", "short_convolution": "x"}
CASES = [
    (name, backend, argument)
    for name, (_, given) in OPS.items()
    for backend in BACKENDS.get(name, ["reference", "chunked", "native"])
    for argument in given
]


def outputs(name, given, backend):
    op = OPS[name][0]
    result = op(**given, backend=backend)
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "backend", "argument"), CASES, ids=str)
def test_one_argument_of_another_dtype_is_computed_with_all_its_digits(name, backend, argument, dtype):
    given = OPS[name][1]
    mixed = given | {argument: given[argument].to(dtype)}
    exact = outputs(name, {n: x.double() for n, x in mixed.items()}, "reference")
    if backend == "native" and library.ABSENT is not None:
        pytest.skip("the native library was not built")
    if backend == "native" and dtype == torch.float64 and argument in ("q", "u"):  # these set the arithmetic
        with pytest.raises(UserError, match="float64 is not offered there"):
            outputs(name, mixed, backend)
        return
    actual = outputs(name, mixed, backend)
    if name in RESULT:
        assert actual.dtype == mixed[RESULT[name]].dtype
    halves = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of outputs that are rounded to them
    tolerance = halves.get(actual.dtype, 1e-5)
    assert (actual - exact).abs().max() <= tolerance * exact.abs().max()
