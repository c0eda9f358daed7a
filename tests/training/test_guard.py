"""A run ends at a loss or weight that is no number and at a jump of the loss; such states are never saved."""

import re

import pytest

from statetrack.errors import Diverged, UserError
from statetrack.run import run
from statetrack.training import Options, read_metrics
from statetrack.training.guard import Guard
from statetrack.training.ranks import Ranks
from statetrack.training.store import checkpoints, read_weights

QUIET = {"say": lambda text: None}


def guard(spike, newest=None):
    return Guard(spike, lambda: newest, Ranks())


def rows(*losses):
    return [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("spike", "losses", "loss", "stops"),
    [
        (1.0, [3.0] * 5, 3.99, False),
        (1.0, [3.0] * 5, 4.01, True),
        (1.0, [3.0] * 4, 9.0, False),  # too few rows to speak of a median
        (0.0, [3.0] * 5, 9.0, False),
        (1.0, [9.0] * 30 + [3.0] * 15, 4.01, True),  # of the last 20 rows, most are at 3
        (1.0, [3.0] * 15 + [9.0] * 15, 9.5, False),
        (0.0, [], float("nan"), True),
        (0.0, [], float("inf"), True),
    ],
)
def test_a_spike_is_a_loss_too_far_above_the_median_of_the_last_rows(spike, losses, loss, stops):
    if not stops:
        guard(spike).check_loss(loss, 50, rows(*losses))
        return
    with pytest.raises(Diverged):
        guard(spike).check_loss(loss, 50, rows(*losses))


def test_a_run_that_jumps_ends_with_its_last_checkpoint_named(small_spec, change, tmp_path):
    """With a limit this narrow, the noise of the loss is a jump."""
    spec = change(small_spec, log_every=1, lr=1e-9)
    with pytest.raises(Diverged, match="The loss jumped to") as stopped:
        run(spec, tmp_path, Options(checkpoint_seconds=0.0, spike=1e-4, **QUIET))
    newest = checkpoints(tmp_path)[0]
    assert f"The last good checkpoint is {newest}." in str(stopped.value)
    step = int(re.findall(r"at step (\d+)", str(stopped.value))[0])
    assert int(newest.stem.split("-")[1]) == step - 1
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == step - 1
    said = []
    run(spec, tmp_path, Options(say=said.append))
    assert said == [f"Going on from step {step - 1} of 40."]


def test_a_jump_between_two_log_lines_is_not_saved(small_spec, change, tmp_path):
    """Five rows of four steps; then every checkpoint is held against their median."""
    spec = change(small_spec, log_every=4, lr=1e-9)
    with pytest.raises(Diverged, match="The loss jumped to") as stopped:
        run(spec, tmp_path, Options(checkpoint_seconds=0.0, spike=1e-4, **QUIET))
    step = int(re.findall(r"at step (\d+)", str(stopped.value))[0])
    assert step % 4
    assert int(checkpoints(tmp_path)[0].stem.split("-")[1]) == step - 1


def test_a_loss_that_is_no_number_is_not_saved_between_two_log_lines(small_spec, change, tmp_path):
    spec = change(small_spec, log_every=1000, lr=1e19, warmup=0.2, clip=0.0, weight_decay=0.0)
    with pytest.raises(Diverged, match="Try a smaller --lr") as stopped:
        run(spec, tmp_path, Options(checkpoint_seconds=0.0, **QUIET))
    for checkpoint in checkpoints(tmp_path):
        assert all(weight.isfinite().all() for weight in read_weights(checkpoint).values())
    assert "The last good checkpoint is" in str(stopped.value)


def test_weights_that_are_no_numbers_are_not_saved_after_a_finite_loss(small_spec, change, tmp_path):
    """The first loss is finite; the step after it makes every decayed weight infinite."""
    spec = change(small_spec, lr=1e38, warmup=0.0, weight_decay=1e30, clip=0.0)
    with pytest.raises(Diverged, match=r"A weight is infinite or NaN after step 1\. .* no checkpoint before"):
        run(spec, tmp_path, Options(checkpoint_seconds=0.0, **QUIET))
    assert checkpoints(tmp_path) == []


def test_a_limit_below_zero_is_refused():
    with pytest.raises(UserError, match=r"spike is -1\.0, expected 0"):
        Options(spike=-1.0)
