"""Packed sequences in the selective scan: every backend against the reference, sequence by sequence.

The Triton backend runs interpreted on a CPU, in tiles of four steps by eight channels, or of two by eight
where it would give two channels to a lane.
"""

import itertools

import pytest
import torch
from scan_inputs import DEVICE, EXTRAS, layer_inputs, run

from statetrack.errors import UserError
from statetrack.ops.checks import checked
from statetrack.ops.selective_scan import selective_scan

TIMED = ("u", "delta", "B", "C", "z")
LENGTHS = [3, 0, 1, 9, 4, 6, 0]


def packed_inputs(lengths=LENGTHS, D=5, N=2, extras=EXTRAS, by_time=()):
    """What the Mamba layer hands over for one row: views of (1, time, D), but for those `by_time`."""
    T, sequences = sum(lengths), len(lengths)
    inputs = layer_inputs(1, T, D, N, states=sequences, extras=extras, by_time=by_time)
    return inputs, offsets(lengths)


def offsets(lengths, dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=DEVICE)


def assert_same(actual, expected, tolerance=1e-4):
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def backend_here(name):
    if name == "native":
        from statetrack.ops.native import library

        if library.ABSENT or DEVICE.type != "cpu":
            pytest.skip("no native kernels here")
    return name


BACKENDS = ("chunked", "native", "triton")


def test_the_reference_runs_every_sequence_on_its_own():
    inputs, cu_seqlens = packed_inputs()
    options = {"delta_softplus": True, "return_last_state": True, "backend": "reference"}
    out, h = selective_scan(**inputs, **options, cu_seqlens=cu_seqlens)
    for s, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        alone = {name: x[..., start:stop] if name in TIMED else x for name, x in inputs.items()}
        alone["initial_state"] = inputs["initial_state"][s : s + 1]
        expected, last = selective_scan(**alone, **options)
        assert torch.equal(out[..., start:stop], expected)
        assert torch.equal(h[s : s + 1], last)


@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
@pytest.mark.parametrize(
    ("extras", "softplus"), [((), False), (EXTRAS, True), (EXTRAS[:3], True), (("initial_state",), False)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_match_the_reference(backend, extras, softplus, eigenvalues):
    inputs, cu_seqlens = packed_inputs(extras=extras)
    options = {"delta_softplus": softplus, "eigenvalues": eigenvalues, "cu_seqlens": cu_seqlens}
    assert_same(run(inputs, backend_here(backend), **options), run(inputs, "reference", **options))


@pytest.mark.parametrize("lengths", [[5], [1], [1, 1, 1], [0, 8, 0], [0, 0, 2, 12, 4], [3, 3, 3, 3]])
@pytest.mark.parametrize(("D", "N"), [(1, 1), (8, 3), (9, 1)])
def test_triton_matches_the_reference_around_the_tile_sizes(lengths, D, N):
    inputs, cu_seqlens = packed_inputs(lengths, D, N)
    options = {"delta_softplus": True, "eigenvalues": "[-1,1]", "cu_seqlens": cu_seqlens}
    assert_same(run(inputs, "triton", **options), run(inputs, "reference", **options))


@pytest.mark.parametrize("by_time", [("u", "delta", "B", "z"), ("delta",), ("u",)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_layout_and_integer_is_taken(backend, by_time):
    inputs, _ = packed_inputs([8, 8, 1, 7], by_time=by_time)
    spaced = torch.stack([offsets([8, 8, 1, 7], torch.int64)] * 2, dim=1)[:, 0]
    options = {"delta_softplus": True, "cu_seqlens": spaced, "max_seqlen": 8}
    assert_same(run(inputs, backend_here(backend), **options), run(inputs, "reference", **options))


MANY = [3, 1, 5, 0, 2, 4, 1, 2, 6] if DEVICE.type == "cpu" else [3, 1, 5, 0, 2, 4, 1, 2, 9] * 120


@pytest.mark.parametrize("eigenvalues", ["[0,1]", "[-1,1]"])
@pytest.mark.parametrize(("extras", "by_time"), [(EXTRAS, ()), (EXTRAS[:3], ("delta",))])
def test_many_sequences_give_two_channels_to_a_lane(extras, by_time, eigenvalues):
    from statetrack.ops.selective_scan.triton.plan import PAIRED, partition_for

    inputs, cu_seqlens = packed_inputs(MANY, PAIRED.channels + 2, extras=extras, by_time=by_time)
    assert partition_for(inputs["u"], cu_seqlens).tile == PAIRED
    options = {"delta_softplus": True, "eigenvalues": eigenvalues, "cu_seqlens": cu_seqlens}
    assert_same(run(inputs, "triton", **options), run(inputs, "reference", **options))


def test_more_states_than_registers_hold_go_in_tiles(monkeypatch):
    from statetrack.ops.selective_scan.triton import launches

    monkeypatch.setattr(launches, "STEPWISE_MAX_STATES", 2)
    inputs, cu_seqlens = packed_inputs(MANY, 2 * launches.PAIRED.channels, N=3)
    options = {"eigenvalues": "[-1,1]", "cu_seqlens": cu_seqlens}
    assert_same(run(inputs, "triton", **options), run(inputs, "reference", **options))


def test_programs_take_the_longest_sequences_first():
    from statetrack.ops.selective_scan.triton.length_sort import length_sort_kernel

    longest_first = torch.empty(5, dtype=torch.int32, device=DEVICE)
    length_sort_kernel[(3, 1)](offsets([3, 0, 9, 3, 9]), longest_first, 5, 2, 4, num_warps=1)
    assert longest_first.tolist() == [2, 4, 0, 3, 1]


@pytest.mark.parametrize("groups", [0, 1, 2])
def test_constant_and_grouped_weights(groups):
    inputs, cu_seqlens = packed_inputs(D=4)
    if groups:
        inputs["B"] = torch.stack([inputs["B"] * (g + 1) for g in range(groups)], dim=1)
    else:
        inputs["B"] = torch.randn(4, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    inputs = {name: x.double() for name, x in inputs.items()}
    options = {"delta_softplus": True, "cu_seqlens": cu_seqlens}
    assert_same(run(inputs, "chunked", **options), run(inputs, "reference", **options), 1e-10)


@pytest.mark.parametrize("extras", [(), EXTRAS])
def test_a_row_of_empty_sequences_hands_its_states_on(extras):
    inputs, cu_seqlens = packed_inputs([0, 0], extras=extras)
    expected = inputs.get("initial_state", torch.zeros(2, 5, 2, device=DEVICE))
    for backend in ("reference", "chunked", "auto"):
        out, h = selective_scan(**inputs, cu_seqlens=cu_seqlens, return_last_state=True, backend=backend)
        assert out.shape == (1, 5, 0)
        assert torch.equal(h, expected)


def test_without_gradients_no_states_are_kept_and_the_result_is_the_same():
    inputs, cu_seqlens = packed_inputs()
    options = {"delta_softplus": True, "cu_seqlens": cu_seqlens}
    expected = run(inputs, "triton", **options)
    out, h = selective_scan(**inputs, **options, return_last_state=True, backend="triton")
    assert torch.equal(out, expected["out"])
    assert torch.equal(h, expected["h"])


def test_saved_states_of_packed_sequences_never_share_a_place():
    from statetrack.ops.selective_scan.triton.plan import SINGLE, saved_size

    L = SINGLE.steps
    generator = torch.Generator().manual_seed(0)
    for most in (1, L, 2 * L + 1, 5 * L):
        lengths = torch.randint(0, most + 1, (40,), generator=generator).tolist()
        starts = [0, *itertools.accumulate(lengths)]
        saved = [(T - 1) // L if T else 0 for T in lengths]
        places = [start // L + j for start, number in zip(starts, saved) for j in range(number)]
        capacity = saved_size(torch.empty(1, 1, starts[-1]), torch.empty(1, 1), torch.empty(41), save=True)
        assert len(set(places)) == len(places)
        assert max(places, default=-1) < capacity


def test_halves_come_back_as_halves_with_states_in_float32():
    inputs, cu_seqlens = packed_inputs()
    halves = {name: inputs[name].half() for name in TIMED}
    for backend in BACKENDS:
        name = backend_here(backend)
        out, h = selective_scan(
            **inputs | halves, cu_seqlens=cu_seqlens, return_last_state=True, backend=name
        )
        assert (out.dtype, h.dtype) == (torch.float16, torch.float32)


def test_the_ops_are_what_torch_library_expects():
    inputs, cu_seqlens = packed_inputs([2, 0, 5], D=3, N=1)
    leaves = [x.requires_grad_() for x in inputs.values()]
    torch.library.opcheck(
        torch.ops.statetrack.selective_scan_forward.default,
        (*leaves, cu_seqlens, True, True, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def wrong(**changes):
    inputs, cu_seqlens = packed_inputs([3, 4])
    return inputs | {"cu_seqlens": cu_seqlens} | changes


BATCH_2 = {name: torch.ones(2, 2 if name in "BC" else 5, 7) for name in TIMED}


@pytest.mark.skipif(DEVICE.type != "cpu", reason="offsets on a GPU are looked at in checked mode only")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": [0, 3, 7]}, "cu_seqlens is a list, expected a tensor"),
        ({"cu_seqlens": torch.tensor([0.0, 7.0])}, "at least two offsets in int32 or int64"),
        ({"cu_seqlens": torch.tensor([0])}, "at least two offsets in int32 or int64"),
        ({"cu_seqlens": torch.tensor([0, 3, 7], device="meta")}, "on meta, expected a vector"),
        ({"cu_seqlens": torch.tensor([0, 3, 6])}, "rise from 0 to time = 7"),
        ({"cu_seqlens": torch.tensor([1, 3, 7])}, "rise from 0 to time = 7"),
        ({"cu_seqlens": torch.tensor([0, 8, 7])}, "rise from 0 to time = 7"),
        ({"max_seqlen": 3}, "a sequence has 4 steps, more than max_seqlen = 3"),
        ({"cu_seqlens": None, "initial_state": None, "max_seqlen": 7}, "only with cu_seqlens"),
        ({"initial_state": torch.ones(1, 5, 2)}, r"expected \(sequences, channels, states\) = \(2, 5, 2\)"),
        (BATCH_2, "need batch 1, got 2. Flatten them into one row"),
    ],
)
def test_what_is_wrong_with_the_offsets_is_said(changes, message):
    with pytest.raises(UserError, match=message):
        selective_scan(**wrong(**changes))


def test_checked_mode_takes_packed_sequences():
    with checked():
        selective_scan(**wrong(), max_seqlen=4)
