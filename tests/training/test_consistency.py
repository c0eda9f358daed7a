"""The training option `consistency`: the logits of equal answers are drawn together."""

import copy

import pytest
import torch

from statetrack import UserError, model_config
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import IGNORE, WordProblem, task
from statetrack.training import Options
from statetrack.training.consistency import logit_scatter
from statetrack.training.graph_step import GraphStep
from statetrack.training.loop import check_options
from statetrack.training.source import source_of
from statetrack.training.state import new_state

CPU = torch.device("cpu")


@pytest.fixture
def spec():
    return RunSpec(
        task=WordProblem(group="S3"),
        model=model_config("deltanet", d_model=16, heads=2),
        training=TrainingConfig(batch=32, lr=3e-3, steps=150, train_lengths=(6, 6)),
        evaluation=EvaluationConfig(eval_lengths=(6, 12), eval_samples=8),
    ).resolved()


def scatter_by_hand(logits, targets):
    """One answer after the other, in float64."""
    rows = [(z - z.mean(), int(y)) for z, y in zip(logits.double(), targets, strict=True)]
    rows = [(z, y) for z, y in rows if y >= 0 and int(z.argmax()) == y]
    means = {y: torch.stack([z for z, other in rows if other == y]).mean(0) for _, y in rows}
    return sum(((z - means[y]) ** 2).sum() for z, y in rows) / max(1, len(rows))


def test_the_scatter_of_logits_is_that_of_right_answers_around_the_mean_of_their_class():
    """With the gradient that also goes through the means, which is the same."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 3, generator=generator).requires_grad_()
    targets = torch.randint(3, (40,), generator=generator)
    targets[::5] = IGNORE
    ours = logit_scatter(logits.view(4, 10, 3), targets.view(4, 10))
    theirs = scatter_by_hand(logits, targets)
    torch.testing.assert_close(ours, theirs.float())
    torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in (ours, theirs)))
    shifted = logits + torch.randn(40, 1, generator=generator)  # nothing that softmax sees
    torch.testing.assert_close(logit_scatter(shifted, targets), ours)


def test_where_no_answer_is_right_there_is_no_scatter():
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]], requires_grad=True)
    scatter = logit_scatter(logits, torch.tensor([0, IGNORE]))
    scatter.backward()
    assert scatter == 0
    assert not logits.grad.any()


def trained(spec, steps, weights=None):
    state = new_state(spec, CPU)
    if weights is not None:
        state.model.load_state_dict(weights)
    step = GraphStep(spec, state, source_of(spec, CPU), print)
    for _ in range(steps):
        step()
    return state.model


def test_consistency_brings_the_logits_of_equal_answers_together(spec, change):
    """Fifty more steps with and without it, from weights that are mostly right."""
    weights = copy.deepcopy(trained(spec, 150).state_dict())
    batch = spec.task.sample(64, (6, 6), torch.Generator().manual_seed(1))
    without, after = (
        logit_scatter(trained(change(spec, consistency=c), 50, weights)(batch.inputs)[0], batch.targets)
        for c in (0.0, 0.1)
    )
    assert 0 < after < without / 2


@pytest.mark.parametrize("name", ["parity", "s5-swaps"])
def test_a_run_with_consistency_has_its_own_id_and_other_weights(name, change, tmp_path):
    """A label at the end of words of several lengths, and one at every position."""
    spec = RunSpec(
        task=task(name),
        model=model_config("deltanet", d_model=16, heads=2),
        training=TrainingConfig(batch=32, lr=1e-2, steps=20, warmup=0.0),
        evaluation=EvaluationConfig(eval_samples=8),
    ).resolved()
    losses = []
    for weight in (0.0, 1.0):
        changed = change(spec, consistency=weight)
        assert (changed.id == spec.id) == (weight == 0)
        run(changed, tmp_path / str(weight), Options(say=lambda text: None))
        losses.append((tmp_path / str(weight) / "metrics.jsonl").read_text())
    assert losses[0] != losses[1]


def test_the_short_sequences_of_a_curriculum_go_without(spec, change):
    without = change(spec, short_steps=3, short_length=2)
    after = {
        c: [trained(change(without, consistency=c), steps).state_dict()["head.weight"] for steps in (3, 30)]
        for c in (0.0, 1.0)
    }
    assert torch.equal(after[0.0][0], after[1.0][0])
    assert not torch.equal(after[0.0][1], after[1.0][1])


def test_consistency_is_refused_in_several_pieces_and_below_zero(spec, change):
    with pytest.raises(UserError, match=r"consistency is 0\.1, which is for one process"):
        check_options(change(spec, consistency=0.1), Options(device="cpu", micro_batches=2))
    with pytest.raises(UserError, match=r"consistency is -1, expected at least 0"):
        change(spec, consistency=-1)
