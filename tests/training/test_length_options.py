"""Options that keep a tracker right at long lengths: initial states, the selected weights, the loss."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Generator

from statetrack.errors import UserError
from statetrack.files import load_tensors
from statetrack.horizon import FARTHEST, horizon_in_training
from statetrack.layers import model_config
from statetrack.run import load_run, run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import IGNORE, Batch, WordProblem, answer_positions, group, task
from statetrack.training import Options
from statetrack.training.graph_step import GraphStep
from statetrack.training.initial_states import PRODUCTS, InitialStates
from statetrack.training.loop import check_options
from statetrack.training.protocols import WHOLE
from statetrack.training.selection import SEED, SEQUENCES
from statetrack.training.source import source_of
from statetrack.training.state import new_state

CPU = torch.device("cpu")
QUIET = Options(say=lambda text: None, checkpoint_seconds=1e9)


@pytest.fixture
def spec():
    """S3 by a DeltaNet of width 8 with convolutions, whose state has more than one part."""
    return RunSpec(
        task=WordProblem(group="S3"),
        model=model_config("deltanet", d_model=8, heads=2, layers=2),
        training=TrainingConfig(
            steps=16, batch=4, lr=1e-2, schedule="constant", warmup=0.0, train_lengths=(6, 6), log_every=5
        ),
        evaluation=EvaluationConfig(eval_lengths=(6, 12), eval_samples=8, eval_every=8),
    ).resolved()


OPTIONS = {
    "noise": {"initial_states": "noise", "state_noise": 0.5},
    "carried": {"initial_states": "carried", "carried_batches": 3},
    "carried-right": {"initial_states": "carried-right", "carried_batches": 3},
    "select": {"select": "horizon", "select_every": 3},
    "loss": {"centred_gradient": True, "z_loss": 0.01, "label_smoothing": 0.1},
    "isometry": {"isometry": 0.1},
    "short": {"short_steps": 12, "short_batch": 6, "initial_states": "carried", "carried_batches": 3},
    "noise, short": {"short_steps": 8, "short_batch": 6, "initial_states": "noise"},
    "consistency": {"consistency": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_that_was_cut_ends_with_the_same_bytes(spec, name, change, run_until, tmp_path):
    spec = change(spec, **OPTIONS[name])
    run(spec, tmp_path / "whole", QUIET)
    run_until(spec, tmp_path / "cut", 10)
    run(spec, tmp_path / "cut", QUIET)
    for file in ("model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.parametrize("name", ["noise", "carried", "loss", "isometry", "short", "consistency"])
def test_each_option_changes_the_weights_and_the_id(spec, name, change, tmp_path):
    spec = change(spec, steps=4)
    changed = change(spec, **OPTIONS[name])
    assert changed.id != spec.id
    for part in (spec, changed):
        run(part, tmp_path / part.id, QUIET)
    there, here = (load_tensors(tmp_path / part.id / "model.safetensors")[0] for part in (spec, changed))
    assert not torch.equal(there["head.weight"], here["head.weight"])


def carried(spec, change, batches):
    spec = change(spec, initial_states="carried", carried_batches=batches)
    state = new_state(spec, CPU)
    return InitialStates(spec, state), state


def drawn(spec, state):
    return spec.task.sample(4, (6, 6), state.generator)


def test_carried_sequences_go_on_with_the_product_and_the_state_of_the_batch_before(spec, change):
    """Two batches of 7 tokens, by a loop over the table of S3, and by the model on all 14 at once."""
    states, state = carried(spec, change, batches=10**9)
    seen, logits = [], []
    for _ in range(2):
        batch, start = states.begin(drawn(spec, state))
        result, after = state.model(batch.inputs, start)
        states.end(batch, after, result)
        seen.append(batch)
        logits.append(result)
    tokens, targets = (torch.cat([getattr(b, name) for b in seen], 1) for name in ("inputs", "targets"))
    bos, then = spec.task.bos, group("S3").then
    for row, labels in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert row[0] == labels[0] == bos
        assert bos not in row[1:]
        product = 0
        for token, label in zip(row[1:], labels[1:], strict=True):
            product = int(then[product, token])
            assert label == product
    torch.testing.assert_close(torch.cat(logits, 1), state.model(tokens)[0])


def test_carried_sequences_begin_anew_as_often_as_asked(spec, change):
    states, state = carried(spec, change, batches=4)
    fresh = 0
    for _ in range(200):
        batch, start = states.begin(drawn(spec, state))
        began = batch.inputs[:, 0] == spec.task.bos
        assert not start[0].S[began].any()
        assert not start[1].convolution[2][began].any()
        states.end(batch, [layer._replace(S=layer.S + 1) for layer in start], torch.empty(0))
        fresh += int(began.sum())
    assert abs(fresh / 800 - 1 / 4) < 0.06


def test_sequences_carried_while_right_begin_anew_after_a_wrong_answer(spec, change):
    spec = change(spec, initial_states="carried-right", carried_batches=10**9)
    state = new_state(spec, CPU)
    states = InitialStates(spec, state)
    batch, start = states.begin(drawn(spec, state))
    answers = F.one_hot(batch.targets, spec.task.n_classes).float()
    answers[1, 2] = answers[1, 2].roll(1)  # one wrong answer in row 1, not the last
    states.end(batch, start, answers)
    began = states.begin(drawn(spec, state))[0].inputs[:, 0] == spec.task.bos
    assert began.tolist() == [False, True, False, False]


def test_noisy_states_have_the_deviation_asked_for_and_leave_the_batch_alone(spec, change):
    spec = change(spec, initial_states="noise", state_noise=0.3, batch=64)
    state = new_state(spec, CPU)
    states, batch = InitialStates(spec, state), spec.task.sample(64, (6, 6), state.generator)
    same, start = states.begin(batch)
    assert same is batch
    assert not torch.equal(start[0].S, start[1].S)
    torch.testing.assert_close(start[0].S.std(), torch.tensor(0.3), rtol=0.05, atol=0)
    assert not start[0].convolution[0].any()


def test_the_noise_of_a_step_follows_its_batch_in_the_generator_of_the_data(spec, change):
    """What the model is given in five steps, against the same draws without a model or a step."""
    spec = change(spec, **OPTIONS["noise"])
    state, by_hand = new_state(spec, CPU), new_state(spec, CPU).generator
    step, given = GraphStep(spec, state, source_of(spec, CPU), print), []
    state.model.register_forward_pre_hook(
        lambda module, tokens, options: given.append((tokens[0], options["state"])), with_kwargs=True
    )
    for _ in range(5):
        step()
    for tokens, start in given:
        assert torch.equal(tokens, spec.task.sample(4, (6, 6), by_hand).inputs)
        for layer in start:
            assert torch.equal(layer.S, 0.5 * torch.randn(layer.S.shape, generator=by_hand))
    assert torch.equal(state.generator.get_state(), by_hand.get_state())


@pytest.mark.parametrize("name", ["noise", "carried"])
def test_nothing_random_happens_once_a_step_has_its_batch_and_states(spec, name, change):
    """What a CUDA graph records of the arithmetic is then the same in every replay."""
    spec = change(spec, **OPTIONS[name])
    state = new_state(spec, CPU)
    step = GraphStep(spec, state, source_of(spec, CPU), print)
    batch, states = step.begin(step.draw())
    before, default = state.generator.get_state(), torch.get_rng_state()
    step.arithmetic(batch, states)
    assert torch.equal(state.generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), default)


@pytest.fixture
def horizons(spec, change, tmp_path):
    """A spec with selection, and by step (horizon, minus closeness) and weights of a run whose last step is
    not the best: there the last weights would pass. Which seed gives one depends on how a processor rounds.
    """
    for seed in range(20):
        tried = replace(change(spec, steps=12, lr=1e-1, **OPTIONS["select"]), seed=seed)
        scores, weights = {}, {}
        # at a constant rate, the weights of a step are those of a run that ends there
        for step in (3, 6, 9, 12):
            folder = tmp_path / f"{seed}-{step}"
            run(change(tried, steps=step, select="last"), folder, QUIET)
            model = load_run(folder)[1]
            horizon, closeness = horizon_in_training(model, tried, SEQUENCES, SEED)
            scores[step], weights[step] = (horizon, -closeness), model.state_dict()
        if max(scores, key=scores.__getitem__) != 12:
            return tried, scores, weights
    pytest.fail("the last step was the best one with every seed")


def test_the_selected_weights_are_those_of_the_step_with_the_largest_horizon(horizons, tmp_path):
    spec, scores, weights = horizons
    metrics = run(spec, tmp_path / "all", QUIET)["metrics"]
    best = max(scores, key=scores.get)
    assert metrics["selected_step"] == best
    assert metrics["horizon"] == pytest.approx(scores[best][0])
    selected = load_tensors(tmp_path / "all" / "model.safetensors")[0]
    assert all(torch.equal(selected[name], x) for name, x in weights[best].items())


def test_the_horizon_in_training_looks_at_no_longer_sequence(spec, monkeypatch):
    lengths = []
    fill = type(spec.task).fill
    monkeypatch.setattr(
        type(spec.task), "fill", lambda self, n, *rest: lengths.append(int(n.max())) or fill(self, n, *rest)
    )
    state = new_state(spec, CPU)
    horizon, closeness = horizon_in_training(state.model, spec, 32)
    assert lengths == [6]
    assert 0 < horizon <= FARTHEST
    assert closeness == closeness


def test_a_step_takes_the_loss_of_the_spec(spec, change):
    """The first row's loss, against PyTorch's function with label smoothing and the formula of the z-loss."""
    from statetrack.training.loop import parts_of

    spec = change(spec, z_loss=0.5, centred_gradient=True, label_smoothing=0.2)
    parts = parts_of(spec, None, QUIET)  # type: ignore[arg-type]
    state = parts.new_state()
    batch = spec.task.sample(4, (6, 6), new_state(spec, CPU).generator)
    logits = state.model(batch.inputs)[0].flatten(0, 1)
    square = logits.exp().sum(-1).log().square().mean()
    plain = F.cross_entropy(logits, batch.targets.flatten(), label_smoothing=0.2)
    expected = plain + 0.5 * square
    parts.step(state)()
    assert state.loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)


NORM_LOSSES = {
    "deltanet": {},
    "deltaproduct": {"householders": 3},
    "gated-deltanet": {"gate": "hard"},
    "kda": {"signed_gate": True, "beta": "hard"},
    "hybrid": {"attention_every": 2},
}


@pytest.mark.parametrize("name", NORM_LOSSES)
def test_isometry_adds_the_norm_that_betas_and_gates_lose_to_the_loss(spec, name, change):
    """Against the mean of 1 - (1 - beta)^2 and of 1 - a^2 in every layer, from the weights of the layers."""
    preset = "deltanet" if name == "hybrid" else name
    model = model_config(preset, d_model=8, heads=2, layers=2, **NORM_LOSSES[name])
    spec = change(replace(spec, model=model), isometry=0.25)
    state = new_state(spec, CPU)
    step = GraphStep(spec, state, source_of(spec, CPU), print)
    batch = spec.task.sample(4, (6, 6), new_state(spec, CPU).generator)
    read = []
    hooks = [b.mixer.register_forward_pre_hook(lambda _, x: read.append(x[0])) for b in state.model.blocks]
    loss = F.cross_entropy(state.model(batch.inputs)[0].flatten(0, 1), batch.targets.flatten())
    for hook in hooks:
        hook.remove()
    lost = torch.zeros(())
    for block, x in zip(state.model.blocks, read, strict=True):
        if not hasattr(block.mixer, "to_beta"):
            continue
        share = torch.sigmoid(block.mixer.to_beta(x))
        if block.mixer.hard_beta:
            share = (1.02 * share - 0.01).clamp(0, 1)
        lost = lost + (1 - (1 - 2 * share) ** 2).mean()
        if name in ("gated-deltanet", "kda"):
            source = {"decay": block.mixer.to_decay(x)} if name == "gated-deltanet" else x
            gates = block.mixer._gates(source)
            lost = lost + (1 - (gates["a"] if "a" in gates else gates["g"].exp()) ** 2).mean()
    step()
    assert lost > 0.1
    assert state.loss_sum.item() == pytest.approx((loss + 0.25 * lost / 2).item(), rel=1e-5)


def test_isometry_brings_betas_to_their_bounds(spec, change):
    """With little else to learn from, after 60 steps every beta is nearer to 0 or 2 than at the start."""
    spec = change(spec, isometry=1.0, lr=3e-2, steps=60)
    state = new_state(spec, CPU)
    step = GraphStep(spec, state, source_of(spec, CPU), print)
    batch = spec.task.sample(4, (6, 6), torch.Generator().manual_seed(5))

    def lost():
        eigenvalues = torch.cat([e.flatten() for e in state.model.transition_eigenvalues(batch.inputs)])
        return (1 - eigenvalues.square()).mean().item()

    before = lost()
    for _ in range(60):
        step()
    assert lost() < 0.1 * before


@pytest.mark.parametrize("options", [{}, {"householders": 3}, {"householders": 3, "gated": True}], ids=str)
def test_isometry_leaves_out_what_follows_the_answer(small_spec, options):
    """Words of several lengths are padded; other tokens in place of the padding change nothing."""
    model = model_config("deltanet-no-conv", d_model=8, heads=2, **options)
    training = TrainingConfig(steps=1, batch=8, train_lengths=(3, 12), isometry=1.0)
    spec = replace(small_spec, task=task("parity"), model=model, training=training)
    spec = replace(spec, evaluation=EvaluationConfig()).resolved()
    step = GraphStep(spec, new_state(spec, CPU), source_of(spec, CPU), print)
    batch = spec.task.sample(8, (3, 12), torch.Generator().manual_seed(0))
    after = torch.arange(batch.inputs.shape[1]) > answer_positions(batch.targets)
    assert after.any()

    def loss(inputs):
        return step._loss(*step._arguments(Batch(inputs, batch.targets), None))[0]

    same, other = (loss(torch.where(after, token, batch.inputs)) for token in (0, 1))
    assert same == loss(batch.inputs) == other
    assert loss(torch.where(after, batch.inputs, 0)) != same


def test_without_isometry_nothing_is_collected(spec):
    from statetrack.layers.norm_loss import collected_norm_loss

    model = new_state(spec, CPU).model
    inputs = torch.zeros(1, 4, dtype=torch.int64)
    with collected_norm_loss(model, on=False) as lost:
        model(inputs)
    assert lost == []
    with collected_norm_loss(model) as lost:
        model(inputs)
    assert len(lost) == 2
    model(inputs)
    assert len(lost) == 2


def test_isometry_is_refused_where_it_would_do_nothing(spec, small_spec, change):
    with pytest.raises(UserError, match="needs a layer of the delta rule"):
        change(replace(spec, model=model_config("gla", d_model=8)), isometry=0.1)
    spec = change(spec, isometry=0.1)
    with pytest.raises(UserError, match=r"isometry is 0\.1, which is for one process without micro-batches"):
        check_options(spec, Options(micro_batches=2, say=lambda text: None))
    with pytest.raises(UserError, match="computed again"):
        check_options(spec, Options(activation_checkpointing=True, say=lambda text: None))


WRONG = [
    ({"isometry": -0.1}, "isometry is -0.1, expected at least 0"),
    ({"select": "best"}, "select 'best' is not known"),
    ({"initial_states": "random"}, "initial_states 'random' is not known"),
    ({"z_loss": -1.0}, "z_loss is -1.0, expected at least 0"),
    ({"label_smoothing": 1.0}, "label_smoothing is 1.0, expected at least 0 and below 1"),
    ({"carried_batches": 0}, "carried_batches is 0, expected at least 1"),
    ({"select_every": 0}, "select_every is 0, expected at least 1"),
    ({"initial_states": "carried", "train_lengths": (3, 6)}, "one training length"),
    ({"initial_states": "carried", "train_samples": 8}, "fresh sequences"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_values_are_explained(spec, fields, message, change):
    with pytest.raises(UserError, match=message):
        change(spec, **fields)


def test_tasks_and_mixers_that_cannot_have_an_option_are_named(spec, small_spec, change):
    other = replace(small_spec, task=task("parity"), evaluation=EvaluationConfig())
    with pytest.raises(UserError, match="is for group word problems, not for Parity"):
        change(other, select="horizon")
    with pytest.raises(UserError, match="expected a group word problem"):
        change(other, initial_states="carried")
    with pytest.raises(UserError, match="a label at every position, not Parity"):
        change(other, initial_states="noise")
    mamba = replace(spec, model=model_config("mamba", d_model=8))
    with pytest.raises(UserError, match=r"a state of known form\. Mamba does not offer that"):
        change(mamba, initial_states="noise")


def test_micro_batches_are_refused_where_states_are_carried(spec, change):
    options = Options(micro_batches=2, say=lambda text: None)
    with pytest.raises(UserError, match="one process without micro-batches"):
        check_options(change(spec, initial_states="carried"), options)


def test_the_first_steps_have_short_sequences_and_the_others_those_of_train_lengths(spec, change):
    spec = change(spec, short_steps=3, short_length=2)
    source = source_of(spec, CPU)
    for step, length in enumerate([2, 2, 2, 6, 6]):
        source.prepare(step)
        batch = source.batch(step, WHOLE, Generator())
        assert batch.inputs.shape == (4, 1 + length)
        assert source.width(step) == length
        assert not (batch.targets == IGNORE).any()


def test_steps_of_short_sequences_may_have_more_of_them(spec, change):
    source = source_of(change(spec, short_steps=3, short_batch=10), CPU)
    sizes = [len(source.batch(step, WHOLE, Generator()).inputs) for step in range(5)]
    assert sizes == [10, 10, 10, 4, 4]


def test_the_optimiser_begins_anew_behind_the_short_sequences(spec, change):
    """Before, and in runs without them, its moments go on."""
    for short_steps, taken in ((3, [1, 2, 3, 1, 2]), (0, [1, 2, 3, 4, 5])):
        changed = change(spec, short_steps=short_steps)
        state = new_state(changed, CPU)
        step = GraphStep(changed, state, source_of(changed, CPU), print)
        (p, *_) = state.model.parameters()
        for count in taken:
            step()
            assert state.optimizer.state[p]["step"] == count
            if count == 1:  # the mean of gradients is of this one alone
                torch.testing.assert_close(state.optimizer.state[p]["exp_avg"], 0.1 * p.grad)


def test_only_short_sequences_are_carried_on(spec, change):
    """The states that the short ones end in stay as they are once the others begin."""
    spec = change(spec, short_steps=3, short_batch=10, initial_states="carried", carried_batches=10**9)
    state = new_state(spec, CPU)
    step, kept = GraphStep(spec, state, source_of(spec, CPU), print), []
    for _ in range(6):
        step()
        kept.append({name: x.clone() for name, x in state.kept.items()})
    assert len(kept[0][PRODUCTS]) == 10
    assert not torch.equal(kept[1]["carried.0"], kept[2]["carried.0"])
    for later in kept[3:]:
        assert all(torch.equal(later[name], x) for name, x in kept[2].items())
    batch, states = step.initial_states.begin(step.draw())
    assert states is None
    assert (batch.inputs[:, 0] == spec.task.bos).all()


def test_short_sequences_come_before_mixed_lengths_too(spec, change):
    """A batch of mixed lengths is padded to one of a few widths; one of short sequences is not padded."""
    spec = change(spec, short_steps=2, short_length=3, train_lengths=(5, 9))
    source = source_of(spec, CPU)
    assert [source.width(step) for step in range(2)] == [3, 3]
    assert {source.width(step) for step in range(2, 60)} == {6, 7, 8, 9}
    for step in range(4):
        source.prepare(step)
        assert source.batch(step, WHOLE, Generator()).inputs.shape[1] == 1 + source.width(step)


@pytest.mark.parametrize(
    "wrong",
    [
        {"short_length": 6},
        {"short_length": 0},
        {"short_batch": -1},
        {"train_samples": 8},
        {"train_samples": 0, "short_steps": -1},
    ],
)
def test_short_sequences_that_cannot_be_drawn_are_refused(spec, change, wrong):
    with pytest.raises(UserError, match=r"short_(steps|batch) is"):
        change(spec, **{"short_steps": 2} | wrong)


def test_short_sequences_need_labels_at_every_position(small_spec, change):
    with pytest.raises(UserError, match="a label at every position"):
        change(replace(small_spec, task=task("parity")), short_steps=2)
