"""Accuracies counted by hand: a model that says what it is told, on sequences written down here."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from statetrack.layers import model_config
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import IGNORE, Batch
from statetrack.tasks.task import Task
from statetrack.training import evaluate

CPU = torch.device("cpu")


class Scripted(nn.Module):
    """Answers every token from a table: prediction[sequence][position], the sequence known by its token 0."""

    def __init__(self, predictions, classes):
        super().__init__()
        self.register_buffer("predictions", torch.tensor(predictions))
        self.classes, self.batches, self.was_training, self.autocast = classes, [], [], []

    def forward(self, inputs, state=None, at=None):
        self.batches.append(len(inputs))
        self.was_training.append(self.training)
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        said = self.predictions[inputs[:, 0], : inputs.shape[1]]
        if at is not None:
            said = said.gather(1, at)
        return nn.functional.one_hot(said, self.classes).float(), None


@dataclass(frozen=True)
class _Written(Task):
    """A task whose sequences are given; token 0 of a sequence is its number."""

    targets: tuple[tuple[int, ...], ...] = ()
    train_lengths = (2, 4)

    vocab_size = property(lambda self: 16)
    n_classes = property(lambda self: 5)
    chance = property(lambda self: 0.2)

    def _rows(self, numbers):
        width = max(len(self.targets[i]) for i in numbers)
        padded = [[*self.targets[i], *[IGNORE] * (width - len(self.targets[i]))] for i in numbers]
        inputs = torch.zeros(len(numbers), width, dtype=torch.long)
        inputs[:, 0] = torch.tensor(numbers)
        return Batch(inputs, torch.tensor(padded))


@dataclass(frozen=True)
class DenseWritten(_Written):
    """Hands out the sequences in order; the seed of the generator says where the next batch begins."""

    labels = "dense"
    eval_lengths = (1, 2, 4)

    def fill(self, lengths, generator, width=None):
        first = int(generator.initial_seed())
        generator.manual_seed(first + len(lengths))
        return self._rows([first + i for i in range(len(lengths))])


@dataclass(frozen=True)
class LastWritten(_Written):
    """One answer per sequence; sequence i is lengths[i] long, and evaluation may ask in any order."""

    lengths: tuple[int, ...] = ()
    labels = "last"
    eval_lengths = (4, 6, 8)
    shortest = 2

    def draw_lengths(self, batch, lengths, generator):
        assert batch == len(self.lengths)
        assert lengths[0] <= min(self.lengths) <= max(self.lengths) == lengths[1]
        return torch.tensor(self.lengths)

    def fill(self, lengths, generator, width=None):
        places = [list(self.lengths).index(length) for length in lengths.tolist()]
        return self._rows(places)


def spec_of(task, samples, batch=3, lengths=None, **training):
    return RunSpec(
        task,
        model_config("diagonal-toy"),
        TrainingConfig(**training),
        EvaluationConfig(eval_lengths=lengths, eval_samples=samples, eval_batch=batch, eval_seed=0),
    ).resolved()


#                position  0  1  2  3  4
TARGETS = (
    (4, 1, 2, 3, 0),
    (4, 0, 0, 1, 1),
    (4, 3, 3, 3, 3),
    (4, 2, 1, 2, 1),
)
PREDICTED = (
    (4, 1, 2, 3, 0),  # all right
    (4, 0, 1, 1, 1),  # wrong at 2 only
    (4, 3, 3, 3, 0),  # wrong at 4 only
    (0, 2, 1, 2, 1),  # wrong at the start token only
)


def test_accuracy_is_of_one_position_and_sequence_accuracy_of_all_up_to_it():
    """At 1 all four are right there, three from the start on; at 2: three, two; at 4: three, one. No label is
    given twice at 1 and 2; at 4 two of four are 1."""
    model = Scripted(PREDICTED, 5)
    row = evaluate(model, spec_of(DenseWritten(TARGETS), 4), CPU)
    assert row == {
        "accuracy": {"1": 4 / 4, "2": 3 / 4, "4": 3 / 4},
        "sequence_accuracy": {"1": 3 / 4, "2": 2 / 4, "4": 1 / 4},
        "majority_accuracy": {"1": 1 / 4, "2": 1 / 4, "4": 2 / 4},
    }
    assert model.batches == [3, 1], "four samples in batches of three"


@pytest.mark.parametrize(("samples", "batches"), [(1, [1]), (3, [3]), (4, [3, 1])])
def test_every_sample_counts_once_however_batches_are_cut(samples, batches):
    model = Scripted(PREDICTED, 5)
    row = evaluate(model, spec_of(DenseWritten(TARGETS), samples), CPU)
    assert model.batches == batches
    right_at_2 = [1, 0, 1, 1][:samples]
    assert row["accuracy"]["2"] == sum(right_at_2) / samples


def test_a_wrong_answer_far_beyond_the_reported_length_does_not_count():
    row = evaluate(Scripted(PREDICTED, 5), spec_of(DenseWritten(TARGETS), 3, lengths=(3,)), CPU)
    assert row["accuracy"] == {"3": 1.0}
    assert row["sequence_accuracy"] == {"3": 2 / 3}


# Sequences of one answer each; a length counts the answer, so length 8 is seven tokens.
LENGTHS = (8, 4, 6, 5, 7)
ANSWERS = (3, 1, 3, 3, 0)
ANSWERED = (3, 1, 2, 0, 0)  # 8, 4 and 7 are right


def one_answer(length, answer):
    return (*[IGNORE] * (length - 2), answer)


def last_task(lengths=LENGTHS, answers=ANSWERS):
    return LastWritten(tuple(map(one_answer, lengths, answers)), tuple(lengths))


def last_model(said=ANSWERED, lengths=LENGTHS):
    """Says 4 everywhere but at the answer, so that reading another position is wrong."""
    return Scripted([[4] * (n - 2) + [s] + [4] * (9 - n) for n, s in zip(lengths, said, strict=True)], 5)


def test_a_length_on_an_edge_opens_the_next_bin_and_the_last_edge_closes_the_last():
    """Edges 4, 6, 8: lengths 4 and 5 are in 4-5, and 6, 7 and 8 in 6-8. 4 is right; of the others 7 and 8."""
    row = evaluate(last_model(), spec_of(last_task(), 5, batch=2), CPU)
    assert row["accuracy"] == {"4-5": 1 / 2, "6-8": pytest.approx(2 / 3)}


def test_scaled_accuracy_takes_guessing_off():
    """Three of five right, where guessing gets one in five: (0.6 - 0.2) / 0.8 = 0.5."""
    row = evaluate(last_model(), spec_of(last_task(), 5), CPU)
    assert row["scaled_accuracy"] == pytest.approx(0.5)


def test_the_majority_answer_is_counted_over_all_samples():
    """3 is the answer of three in five, in both bins and in several batches: (0.6 - 0.2) / 0.8 = 0.5. A model
    that is always wrong does not change it."""
    row = evaluate(last_model(said=[4] * 5), spec_of(last_task(), 5, batch=2), CPU)
    assert row["majority_scaled_accuracy"] == pytest.approx(0.5)
    assert row["scaled_accuracy"] == pytest.approx(-0.25)


def test_the_majority_answer_of_a_bin_is_that_of_its_own_samples():
    """4-5 have the answers 1 and 3, one each; 6-8 have 3, 3 and 0."""
    row = evaluate(last_model(), spec_of(last_task(), 5, batch=2), CPU)
    assert row["majority_accuracy"] == {"4-5": 1 / 2, "6-8": pytest.approx(2 / 3)}


def test_bins_without_samples_are_left_out():
    lengths, edges = (4, 5, 11, 12), (4, 6, 8, 12)
    task = last_task(lengths, (0, 1, 2, 3))
    said = [[4] * (n - 2) + [s] + [4] * (12 - n) for n, s in zip(lengths, (0, 1, 2, 0), strict=True)]
    row = evaluate(Scripted(said, 5), spec_of(task, 4, lengths=edges), CPU)
    assert row["accuracy"] == {"4-5": 1.0, "8-12": 0.5}


def test_the_model_is_evaluated_in_eval_mode_and_left_as_it_was():
    for training in (True, False):
        model = Scripted(PREDICTED, 5).train(training)
        evaluate(model, spec_of(DenseWritten(TARGETS), 4), CPU)
        assert model.was_training == [False, False]
        assert model.training is training


def test_a_model_that_fails_is_left_as_it_was():
    class Broken(Scripted):
        def forward(self, *args, **options):
            raise RuntimeError("broken")

    model = Broken(PREDICTED, 5).train()
    with pytest.raises(RuntimeError, match="broken"):
        evaluate(model, spec_of(DenseWritten(TARGETS), 4), CPU)
    assert model.training


@pytest.mark.parametrize(("precision", "autocast"), [("float32", False), ("bfloat16", True)])
def test_evaluation_has_the_precision_of_training(precision, autocast):
    model = Scripted(PREDICTED, 5)
    evaluate(model, spec_of(DenseWritten(TARGETS), 4, precision=precision), CPU)
    assert model.autocast == [autocast, autocast]


def test_no_gradient_is_kept():
    class Learned(Scripted):
        def __init__(self, *args):
            super().__init__(*args)
            self.weight = nn.Parameter(torch.ones(()))
            self.tracked = []

        def forward(self, inputs, state=None, at=None):
            logits, state = super().forward(inputs, state, at)
            self.tracked.append((logits * self.weight).requires_grad)
            return logits, state

    model = Learned(PREDICTED, 5)
    evaluate(model, spec_of(DenseWritten(TARGETS), 4), CPU)
    assert model.tracked == [False, False]


def test_the_sequences_depend_on_the_evaluation_seed_alone():
    """What a real task gives to a model that keeps what it sees."""
    from statetrack.tasks import task

    class Listener(Scripted):
        def forward(self, inputs, state=None, at=None):
            self.heard = inputs
            return torch.zeros(*inputs.shape, 121), None

    def heard(seed, eval_seed):
        listener = Listener(PREDICTED, 121)
        spec = RunSpec(task("s5"), seed=seed, evaluation=EvaluationConfig((4, 6), 2, eval_seed=eval_seed))
        evaluate(listener, spec.resolved(), CPU)
        return listener.heard.tolist()

    assert heard(0, 1) == heard(7, 1)
    assert heard(0, 1) != heard(0, 2)
    assert len(heard(0, 1)[0]) == 6 + 1, "one pass at the longest length"


def test_the_default_evaluation_set_is_pinned():
    """Scores of different versions compare only if these are the same sequences."""
    from statetrack.tasks import task

    config = EvaluationConfig()
    assert (config.eval_samples, config.eval_seed) == (1024, 20_241_101)
    batch = task("s5").sample(2, (5, 5), torch.Generator().manual_seed(config.eval_seed))
    assert batch.inputs.tolist() == [[120, 58, 44, 15, 61, 51], [120, 42, 54, 85, 87, 54]]
