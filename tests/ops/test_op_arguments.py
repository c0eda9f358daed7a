"""What is no tensor, no number or no flag is refused by the name of the argument, in every op."""

import inspect

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops.automaton_run import run_automaton
from statetrack.ops.bracket_expressions import bracket_expressions
from statetrack.ops.cross_entropy import cross_entropy
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.embedding import embedding
from statetrack.ops.gated_linear_attention import gated_linear_attention
from statetrack.ops.geglu import geglu
from statetrack.ops.generalised_delta_rule import generalised_delta_rule
from statetrack.ops.head_norm import head_norm
from statetrack.ops.layer_norm import add_layer_norm
from statetrack.ops.linear_cross_entropy import linear_cross_entropy
from statetrack.ops.mlstm import mlstm, mlstm_joined
from statetrack.ops.pack import pack
from statetrack.ops.rms_norm import add_rms_norm, rms_norm
from statetrack.ops.rotary import rotated_split
from statetrack.ops.selective_scan import selective_scan
from statetrack.ops.short_convolution import convolved_split, short_convolution
from statetrack.ops.slstm import slstm
from statetrack.ops.swiglu import swiglu, swiglu_product

ROWS, GATE, WHOLE = torch.zeros(1, 4, 2, 3), torch.zeros(1, 4, 2), torch.zeros(2, 4, dtype=torch.long)
CASES = [
    (delta_rule, [ROWS, ROWS, ROWS, GATE]),
    (gated_linear_attention, [ROWS, ROWS, ROWS, GATE]),
    (generalised_delta_rule, [ROWS] * 6),
    (selective_scan, [torch.zeros(1, 2, 4)] * 2 + [torch.zeros(2, 3)] * 3),
    (mlstm, [ROWS, ROWS, ROWS, GATE, GATE]),
    (mlstm_joined, [torch.zeros(1, 4, 3, 2, 3), GATE, GATE]),
    (slstm, [torch.zeros(1, 4, 2, 4, 3), torch.zeros(2, 3, 12)]),
    (short_convolution, [torch.zeros(1, 4, 2), torch.zeros(2, 3)]),
    (convolved_split, [torch.zeros(1, 4, 3), [2, 1]]),
    (cross_entropy, [torch.zeros(2, 4, 3), WHOLE]),
    (linear_cross_entropy, [torch.zeros(2, 4, 3), torch.zeros(5, 3), WHOLE]),
    (embedding, [WHOLE, torch.zeros(5, 3)]),
    (rms_norm, [torch.zeros(2, 3), torch.ones(3)]),
    (add_rms_norm, [torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3)]),
    (add_layer_norm, [torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3), torch.zeros(3)]),
    (head_norm, [torch.zeros(2, 2, 3), torch.ones(6)]),
    (swiglu, [torch.zeros(2, 4)]),
    (geglu, [torch.zeros(2, 4)]),
    (rotated_split, [torch.zeros(1, 2, 12), 2, 2, 100.0]),
    (swiglu_product, [torch.zeros(2, 4), torch.zeros(5, 2)]),
    (pack, [WHOLE, WHOLE, -100, 8]),
    (run_automaton, [WHOLE, WHOLE, 0]),
    (bracket_expressions, [WHOLE[:, 0], WHOLE, WHOLE, WHOLE, 5]),
]
MAY_BE_NONE = ((gated_linear_attention, "g"), (add_rms_norm, "y"), (add_layer_norm, "y"))


@pytest.mark.parametrize(("op", "given"), CASES, ids=[op.__name__ for op, _ in CASES])
def test_what_is_no_tensor_is_refused_by_name(op, given):
    op(*given)
    names = list(inspect.signature(op).parameters)
    places = [i for i, x in enumerate(given) if isinstance(x, torch.Tensor)]
    assert places
    for place in places:
        for bad, kind in (([1.0], "list"), (1.5, "float"), ("x", "str"), (None, "NoneType")):
            if bad is None and (op, names[place]) in MAY_BE_NONE:
                continue
            with pytest.raises(UserError, match=f"{names[place]} is a {kind}, expected a tensor"):
                op(*given[:place], bad, *given[place + 1 :])


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        (
            delta_rule,
            {"use_qk_l2norm_in_kernel": "yes"},
            "use_qk_l2norm_in_kernel is 'yes', expected True or",
        ),
        (delta_rule, {"beta_from_logits": "2"}, "beta_from_logits is '2', expected the largest beta"),
        (delta_rule, {"g": [0.0]}, "g is a list"),
        (delta_rule, {"initial_state": 0.0}, "initial_state is a float"),
        (selective_scan, {"delta_softplus": [1.0]}, r"delta_softplus is \[1.0\], expected True or False"),
        (selective_scan, {"D": 1.0}, "D is a float"),
        (generalised_delta_rule, {"scale": "1"}, "scale is '1', expected a finite number"),
        (gated_linear_attention, {"angle": 1.0}, "angle is a float"),
        (short_convolution, {"bias": 1.0}, "bias is a float"),
        (slstm, {"bias": 1.0}, "bias is a float"),
        (mlstm, {"signed": "[0,1]"}, r"signed is '\[0,1\]', expected True or False"),
        (mlstm_joined, {"signed": "yes"}, "signed is 'yes', expected True or False"),
        (short_convolution, {"silu": "no"}, "silu is 'no', expected True or False"),
        (delta_rule, {"beta_from_logits": float("inf")}, "beta_from_logits is inf, expected the largest"),
        (head_norm, {"skip": 1.0}, "skip is a float"),
    ],
)
def test_options_of_another_kind_are_refused_by_name(op, options, message):
    (given,) = [given for other, given in CASES if other is op]
    with pytest.raises(UserError, match=message):
        op(*given, **options)


@pytest.mark.parametrize("shape", [(1, 4, 0, 3), (1, 4, 2, 0)])
@pytest.mark.parametrize("op", [delta_rule, gated_linear_attention, generalised_delta_rule, mlstm])
def test_inputs_without_heads_or_key_channels_are_refused(op, shape):
    (given,) = [given for other, given in CASES if other is op]
    resized = [torch.zeros(shape[: x.ndim]) for x in given]
    with pytest.raises(UserError, match="expected at least one head and one channel"):
        op(*resized)


@pytest.mark.parametrize(("channels", "width"), [(0, 3), (2, 0)])
def test_a_convolution_without_channels_or_taps_is_refused(channels, width):
    with pytest.raises(UserError, match="at least one channel and a width of at least 1"):
        short_convolution(torch.zeros(1, 4, channels), torch.zeros(channels, width))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.bool])
def test_offsets_are_refused_in_any_dtype_but_int32_and_int64(dtype):
    """As an index a tensor of bytes is a mask."""
    for op, given in CASES:
        if "cu_seqlens" in inspect.signature(op).parameters:
            offsets = torch.tensor([0, 1], dtype=dtype)
            with pytest.raises(
                UserError, match="expected a vector of at least two offsets in int32 or int64"
            ):
                op(*given, cu_seqlens=offsets)
