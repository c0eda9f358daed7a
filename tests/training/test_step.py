"""One training step: its data, its shapes, its learning rate."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Generator

from statetrack.files import load_tensors
from statetrack.layers import model_config
from statetrack.ops.adamw import recorded_adamw
from statetrack.ops.checks import checked
from statetrack.ops.native import library
from statetrack.tasks import IGNORE, TASKS, task
from statetrack.training.graph_step import GraphStep
from statetrack.training.optimizer import learning_rate
from statetrack.training.protocols import WHOLE
from statetrack.training.source import WIDTHS, batch_length, batch_width, source_of
from statetrack.training.state import new_state
from statetrack.training.store import FileStore, checkpoints

CPU = torch.device("cpu")
built = pytest.mark.skipif(library.ABSENT is not None, reason="the native library was not built")


def graph_step(spec):
    return GraphStep(spec, new_state(spec, CPU), source_of(spec, CPU), print)


def test_a_dense_batch_is_padded_to_one_of_a_few_widths_and_not_scored_beyond_its_length(small_spec, change):
    spec = change(small_spec, train_lengths=(3, 40))
    widths, source = set(), source_of(spec, CPU)
    for step in range(200):
        length = batch_length(spec, step)
        source.prepare(step)
        batch = source.batch(step, WHOLE, Generator())
        widths.add(batch.inputs.shape[1] - 1)
        assert (
            length
            <= batch.inputs.shape[1] - 1
            == batch_width(spec.training.train_lengths, length)
            == source.width(step)
        )
        assert ((batch.targets != IGNORE).sum(1) == length + 1).all()
    assert len(widths) == WIDTHS
    assert max(widths) == 40
    assert {batch_length(spec, step) for step in range(600)} == set(range(3, 41))


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_shape_of_a_batch_does_not_depend_on_what_is_drawn(name, small_spec, change):
    chosen = task(name)
    spec = change(replace(small_spec, task=chosen), train_lengths=(5, 9))
    source = source_of(spec, CPU)
    if chosen.labels == "last":
        shapes = {source.batch(0, WHOLE, Generator().manual_seed(i)).inputs.shape for i in range(50)}
        assert len(shapes) == 1
    assert source.capturable == ("brackets" not in name)


def test_the_rate_of_a_step_is_that_of_the_schedule(small_spec):
    step = graph_step(small_spec)
    for number in range(12):
        step()
        for group in step.state.optimizer.param_groups:
            assert group["lr"].item() == pytest.approx(learning_rate(number, small_spec.training), rel=1e-6)


def test_adamw_is_the_textbook_rule(small_spec, change):
    """One step by hand: decay, then the moments corrected for their start, which make the step lr * sign."""
    spec = change(small_spec, clip=0.0, warmup=0.0)
    step = graph_step(spec)
    before = {name: p.detach().clone() for name, p in step.state.model.named_parameters()}
    step()
    lr, eps = spec.training.lr, spec.training.eps
    for name, p in step.state.model.named_parameters():
        decayed = spec.training.weight_decay if p.ndim >= 2 and "embedding" not in name else 0.0
        expected = before[name] * (1 - lr * decayed) - lr * p.grad / (p.grad.abs() + eps)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-7)


def test_a_step_with_the_recorded_update_is_the_plain_step(small_spec, monkeypatch):
    """What a CUDA graph holds, here in Triton's interpreter: clipping, decay, moments and the step's rate."""
    plain, recorded = (graph_step(small_spec) for _ in range(2))
    taken = []

    def update():
        taken.append(recorded_adamw(recorded.state.optimizer, small_spec.training.clip))
        return taken[-1]

    monkeypatch.setattr(recorded, "recorded_update", update)
    for _ in range(3):
        plain()
        recorded()
    # the first step, which makes the moments, is PyTorch's
    assert [x is None for x in taken] == [True, False, False]
    for p, q in zip(plain.state.model.parameters(), recorded.state.model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-6)
    moments = (step.state.optimizer.state_dict()["state"] for step in (plain, recorded))
    torch.testing.assert_close(*moments, rtol=1e-3, atol=1e-6)


def test_copies_of_the_weights_change_nothing_under_autocast(small_spec, change, monkeypatch):
    """Graphs run on bfloat16 copies that the update writes; here without the graphs, in the interpreter."""
    spec = change(small_spec, precision="bfloat16")
    monkeypatch.setattr("statetrack.training.graph_step.EAGER_FIRST", 5)
    plain, copied = (graph_step(spec) for _ in range(2))
    copied.uses_graphs = True
    for number in range(5):
        plain()
        copied()
        weights = {} if copied.half_weights is None else copied.half_weights.of
        linears = sum(isinstance(m, torch.nn.Linear) for m in copied.state.model.modules())
        assert len(weights) == (linears if number else 0)  # the first step makes the moments
        for weight, copy in weights.items():
            assert weight.grad is None
            rounded = weight.detach().bfloat16()
            # the interpreter cuts bits off where a GPU rounds
            torch.testing.assert_close(copy.detach(), rounded, rtol=2**-7, atol=0)
            copy.data.copy_(rounded)
    for p, q in zip(plain.state.model.parameters(), copied.state.model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_of_the_deepest_word_problem_model_has_under_16_mib(tmp_path):
    """So that a paper-scale run can be cut into pieces and carried from machine to machine."""
    from statetrack.experiments.fig_s5 import runs

    spec = next(run.spec for run in runs("paper") if run.label == "DeltaNet [-1,1] (5L)")
    spec = replace(spec, training=replace(spec.training, batch=1, precision="float32")).resolved()
    step = graph_step(spec)
    step()
    FileStore(tmp_path, spec.id, print).save(step.state, 0)
    assert checkpoints(tmp_path)[0].stat().st_size < 16 * 2**20


@built
@pytest.mark.parametrize("isometry", [0.0, 0.1])
def test_a_packed_step_is_the_padded_step(isometry, small_spec, change):
    """Tasks with one answer per sequence are trained on packed sequences, on a CPU by the native kernels."""
    spec = change(
        replace(small_spec, task=task("parity")), batch=128, train_lengths=(3, 20), isometry=isometry
    )
    padded, packed = (graph_step(spec) for _ in range(2))
    padded.packer = None
    (rows, width), others = (s._arguments(*s.begin(s.draw()))[0].shape for s in (padded, packed))
    assert rows == 128
    assert others == (1, packed.packer.rows)
    assert others[1] < 0.75 * rows * width
    for _ in range(3):
        padded()
        packed()
    torch.testing.assert_close(packed.state.loss_sum, padded.state.loss_sum, rtol=1e-5, atol=0)
    for p, q in zip(padded.state.model.parameters(), packed.state.model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5)


@built
def test_on_a_cpu_a_small_batch_is_padded_since_packing_would_save_few_rows(small_spec, change):
    """A packed row is six deviations longer than the mean batch."""
    step = graph_step(change(replace(small_spec, task=task("parity")), batch=16, train_lengths=(3, 20)))
    tokens, options, _ = step._arguments(*step.begin(step.draw()))
    assert step.packer is not None
    assert len(tokens) == 16
    assert "packing" not in options


@pytest.mark.parametrize(
    ("name", "mixer", "backend"),
    [("parity-dense", "deltanet", "auto"), ("parity", "slstm", "auto"), ("parity", "deltanet", "reference")],
)
def test_what_packing_cannot_serve_or_would_slow_down_is_padded(
    name, mixer, backend, small_spec, change, monkeypatch
):
    monkeypatch.setenv("STATETRACK_BACKEND", backend)
    model = model_config(mixer, d_model=8, heads=2, layers=1)
    spec = change(replace(small_spec, task=task(name), model=model), batch=128, train_lengths=(3, 20))
    assert graph_step(spec).packer is None


@pytest.mark.parametrize(
    ("backend", "values_checked", "steps"),
    [("auto", False, [1, 2]), ("auto", True, []), ("reference", False, []), ("reference", True, [])],
)
def test_kernels_are_compiled_ahead_in_the_first_two_steps_of_a_width_unless_values_are_checked(
    backend, values_checked, steps, small_spec, change, monkeypatch
):
    """Tests prefer Triton on a CPU too: its kernels are interpreted."""
    asked = []
    monkeypatch.setenv("STATETRACK_BACKEND", backend)
    monkeypatch.setattr(
        "statetrack.ops.triton_runtime.compile_ahead.compile_ahead", lambda work: asked.append(work())
    )
    step, found = graph_step(change(small_spec, train_lengths=(6, 6))), []
    with checked(values_checked):
        for number in range(1, 5):
            step()
            found += [number] * len(asked)
            asked.clear()
    assert found == steps
    assert (step.stream, step.uses_graphs) == (None, False)


@pytest.mark.parametrize("seed", [0, 5, 2**40 + 1, 2**63 - 1])
def test_training_data_have_a_stream_of_their_own_for_every_seed(seed, small_spec):
    """Pinned, for runs of older versions go on here: Knuth's multiplier, in 63 bits."""
    expected = {0: 1, 5: 13_272_178_806, 2**40 + 1: 2_654_435_761 * (2**40 + 1) % 2**63 + 1}
    expected[2**63 - 1] = 2**63 - 2_654_435_761 + 1
    state = new_state(replace(small_spec, seed=seed), CPU)
    assert state.generator.initial_seed() == expected[seed]
    assert (state.step, state.loss_sum.item(), state.loss_sum.dtype) == (0, 0.0, torch.float64)


def test_a_checkpoint_says_what_it_is(small_spec, tmp_path):
    step = graph_step(small_spec)
    for _ in range(3):
        step()
    FileStore(tmp_path, "a run", print).save(step.state, 2)
    _, metadata = load_tensors(tmp_path / "checkpoint-000000003.safetensors")
    expected = {"step": "3", "device": "cpu", "format": "2", "run": "a run", "rows": "2"}
    assert {name: metadata[name] for name in expected} == expected


def test_the_newest_two_checkpoints_are_kept(small_spec, tmp_path):
    step, store = graph_step(small_spec), FileStore(tmp_path, "a run", print)
    for _ in range(4):
        step()
        store.save(step.state, 0)
    assert [path.name[11:20] for path in checkpoints(tmp_path)] == ["000000004", "000000003"]


def test_a_checkpoint_that_someone_else_removes_first_is_no_error(small_spec, tmp_path, monkeypatch):
    step, store, remove = graph_step(small_spec), FileStore(tmp_path, "a run", print), Path.unlink

    def removed_first(path, missing_ok=False):
        if path.name.startswith("checkpoint-"):
            remove(path)
        remove(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", removed_first)
    for _ in range(3):
        step()
        store.save(step.state, 0)
    assert len(checkpoints(tmp_path)) == 2
