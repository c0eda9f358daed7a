"""The Triton selective scan against the reference; interpreted on a CPU, compiled on a GPU.

Interpreted tiles are four steps by eight channels (`plan.SINGLE`): small sizes reach every edge.
"""

import pytest
import torch
from scan_inputs import DEVICE, EXTRAS, assert_same, layer_inputs, run

from statetrack.errors import UserError
from statetrack.ops.selective_scan import selective_scan


def random_inputs(B=2, T=9, D=5, N=2, extras=EXTRAS, by_time=("delta", "z")):
    return layer_inputs(B, T, D, N, extras=extras, by_time=by_time)


@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
@pytest.mark.parametrize(
    ("extras", "softplus"), [((), False), (EXTRAS, True), (("z",), False), (("initial_state",), True)]
)
def test_triton_matches_reference(extras, softplus, eigenvalues):
    options = {"delta_softplus": softplus, "eigenvalues": eigenvalues}
    inputs = random_inputs(extras=extras)
    assert_same(run(inputs, "triton", **options), run(inputs, "reference", **options))


@pytest.mark.parametrize(("T", "D", "N"), [(1, 3, 1), (3, 9, 2), (4, 8, 3), (6, 8, 1), (8, 8, 1), (9, 1, 1)])
def test_triton_matches_reference_around_the_tile_sizes(T, D, N):
    inputs = random_inputs(B=1, T=T, D=D, N=N)
    options = {"delta_softplus": True, "eigenvalues": "[-1,1]"}
    assert_same(run(inputs, "triton", **options), run(inputs, "reference", **options))


@pytest.mark.parametrize("extras", [EXTRAS, ("z",)])
def test_many_sequences_give_two_channels_to_a_lane(extras):
    from statetrack.ops.selective_scan.triton.plan import PAIRED, partition_for

    many = 9 if DEVICE.type == "cpu" else 1100
    inputs = random_inputs(B=many, T=5, D=PAIRED.channels, extras=extras, by_time=())
    assert partition_for(inputs["u"]).tile == PAIRED
    options = {"delta_softplus": True, "eigenvalues": "[-1,1]"}
    assert_same(run(inputs, "triton", **options), run(inputs, "reference", **options))


@pytest.mark.parametrize("by_time", [(), ("u", "delta", "z"), ("u",)])
def test_any_layout_is_taken(by_time):
    inputs = random_inputs(B=1, by_time=by_time)
    inputs["u"] = torch.stack([inputs["u"], inputs["u"]], dim=-1)[..., 0] if not by_time else inputs["u"]
    options = {"delta_softplus": True}
    assert_same(run(inputs, "triton", **options), run(inputs, "reference", **options))


@pytest.mark.parametrize("T", [1, 9])
def test_vectors_may_have_their_numbers_apart(T):
    inputs = random_inputs(T=T)
    apart = {name: torch.stack([inputs[name]] * 2, dim=1)[:, 0] for name in ("D", "delta_bias")}
    assert apart["D"].stride() == (2,)
    assert_same(run(inputs | apart, "triton"), run(inputs, "reference"))


@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
@pytest.mark.parametrize("extras", [("initial_state",), EXTRAS[:3]])
def test_segments_of_a_long_sequence_add_up(extras, eigenvalues):
    from statetrack.ops.selective_scan.triton.plan import SINGLE, partition

    T = SINGLE.steps * 12 + 1
    inputs = random_inputs(B=1, T=T, D=3, N=1, extras=extras)
    assert partition(1, SINGLE.channels, T, 1).segments == 3
    options = {"delta_softplus": True, "eigenvalues": eigenvalues}
    assert_same(run(inputs, "triton", **options), run(inputs, "reference", **options))


def test_halves_are_read_and_written_as_halves():
    inputs = {name: x.half().float() for name, x in random_inputs(B=1, T=6).items()}
    options = {"delta_softplus": True, "eigenvalues": "[-1,1]"}
    actual = run(inputs, "triton", torch.float16, **options)
    assert (actual["out"].dtype, actual["h"].dtype) == (torch.float16, torch.float32)
    assert_same(actual, run(inputs, "reference", **options), 2e-2, 2e-2)  # float16 has ten bits


@pytest.mark.parametrize("T", [9, 50])
def test_without_gradients_no_states_are_kept_and_the_result_is_the_same(T):
    inputs = random_inputs(B=1, T=T, N=1)
    expected = run(inputs, "triton", delta_softplus=True)
    out, h = selective_scan(**inputs, delta_softplus=True, return_last_state=True, backend="triton")
    assert torch.equal(out, expected["out"])
    assert torch.equal(h, expected["h"])


@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
def test_decoding_step_by_step_continues_a_prefill(eigenvalues):
    inputs = random_inputs(B=2, T=7, D=5, N=3)
    options = {"delta_softplus": True, "eigenvalues": eigenvalues, "return_last_state": True}
    expected, last = selective_scan(**inputs, **options, backend="reference")
    timed = ("u", "delta", "B", "C", "z")
    state, outputs = inputs.pop("initial_state"), []
    for stretch in (slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 7)):
        part = {name: x[..., stretch] if name in timed else x for name, x in inputs.items()}
        out, state = selective_scan(**part, initial_state=state, **options, backend="triton")
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, dim=-1), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


def test_small_steps_keep_their_relative_precision():
    """softplus(-12) is 6e-6: log(1 + exp(x)) in float32 would keep two digits of it."""
    inputs = random_inputs(B=1, T=2, D=2, N=1, extras=())
    inputs["delta"] = torch.full_like(inputs["delta"], -12.0)
    actual = run(inputs, "triton", delta_softplus=True)
    expected = run(inputs, "reference", torch.float64, delta_softplus=True)
    for name in ("out", "ddelta", "dA"):
        error = (actual[name] - expected[name]).abs() / expected[name].abs()
        assert error.max() < 1e-5, name


def test_time_is_cut_only_when_sequences_and_channels_leave_processors_idle():
    from statetrack.ops.selective_scan.triton.plan import SINGLE, partition

    L, BD = SINGLE
    assert partition(1024, 8 * BD, 3 * L, processors=132).segments == 1
    assert partition(1, BD, 2 * L, processors=132).segments == 1
    long = partition(1, 64 * BD, 2048 * L, processors=132)
    assert long.segments > 8
    assert (long.segments - 1) * long.segment_tiles < long.tiles <= long.segments * long.segment_tiles


def test_groups_and_constants_are_left_to_the_other_backends():
    inputs = random_inputs()
    with pytest.raises(UserError, match="constant or come in several groups"):
        selective_scan(**inputs | {"B": torch.ones(5, 2, device=DEVICE)}, backend="triton")


@pytest.mark.parametrize(
    ("shape", "reason"), [((70_000, 1, 1), "sequences"), ((1, 1 << 20, 1 << 11), "numbers")]
)
def test_sizes_beyond_the_kernels_are_refused_with_the_reason(shape, reason):
    from statetrack.ops.selective_scan.triton.backend import refuses

    u = torch.empty(1, 1, 1).expand(shape)
    assert reason in (refuses(u, torch.empty(1, 1)) or "")


def test_the_ops_are_what_torch_library_expects():
    inputs = random_inputs(B=1, T=5, D=3, N=1)
    leaves = [x.requires_grad_() for x in inputs.values()]
    torch.library.opcheck(
        torch.ops.statetrack.selective_scan_forward.default,
        (*leaves, None, True, True, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_a_step_size_that_is_nan_is_seen_from_its_step_on():
    inputs = {name: x.detach().clone() for name, x in random_inputs(B=1, extras=()).items()}
    inputs["delta"][:, :, 5] = float("nan")
    y = selective_scan(**inputs, delta_softplus=True, backend="triton")
    assert y[..., 5:].isnan().all()
    assert y[..., :5].isfinite().all()


def test_views_whose_offsets_exceed_32_bits_are_copied():
    """As slices of one wide product over a very long sequence; nothing is allocated."""
    from statetrack.ops.selective_scan.triton.backend import within_32_bits

    rows = torch.empty(1, 2**20, 4096, device="meta")
    near, far = rows[:, : 2**18, :1024].mT, rows[..., :1024].mT
    assert within_32_bits(near) is near
    assert within_32_bits(far).is_contiguous()
    assert within_32_bits(None) is None
