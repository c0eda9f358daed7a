"""A corpus trains in the one loop: batches by step, exact resume, held-out loss by position."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from corpora import END, VOCABULARY, cycling_documents, small_corpus, small_shards
from hypothesis import given
from hypothesis import strategies as st

from statetrack.errors import UserError
from statetrack.layers import model_config
from statetrack.lm.shards import write_shards
from statetrack.run import load_run, run
from statetrack.run import main as run_main
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Corpus, task
from statetrack.training import Options, evaluate
from statetrack.training.corpus_source import CorpusSource, permuted
from statetrack.training.graph_step import GraphStep
from statetrack.training.next_tokens import NextTokens
from statetrack.training.printed_rows import print_row
from statetrack.training.protocols import WHOLE, Share
from statetrack.training.ranks import Ranks
from statetrack.training.sharded_step import ShardedStep
from statetrack.training.state import build_model, new_state

CPU = torch.device("cpu")
QUIET = {"say": lambda text: None}


def small_spec(corpus, **training):
    return RunSpec(
        corpus,
        model_config("deltanet", d_model=16, heads=2),
        TrainingConfig(**({"steps": 12, "batch": 4, "lr": 1e-2, "log_every": 4} | training)),
        EvaluationConfig(eval_lengths=(4, 16), eval_samples=8, eval_batch=3, eval_every=8),
    ).resolved()


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 5))
def test_the_order_of_windows_is_a_permutation(size, seed, epoch):
    assert sorted(permuted(np.arange(size), size, seed, epoch)) == list(range(size))


def test_the_order_depends_on_seed_and_epoch_and_mixes():
    orders = [permuted(np.arange(1000), 1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for i, order in enumerate(orders):
        assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1
        assert all((order != other).mean() > 0.99 for other in orders[:i])


def test_an_epoch_gives_every_token_as_a_target_once(tmp_path):
    source = CorpusSource(small_spec(small_corpus(tmp_path), batch=1))
    stream = source.shards.read("train", 0, source.windows * 16 + 1)
    seen = [source.batch(step, WHOLE, torch.Generator()) for step in range(source.windows)]
    starts = source.window_of(np.arange(source.windows)) * 16
    assert sorted(starts) == list(range(0, source.windows * 16, 16))
    for start, (inputs, targets) in zip(starts, seen, strict=True):
        assert inputs[0].tolist() == stream[start : start + 16].tolist()
        assert targets[0].tolist() == stream[start + 1 : start + 17].tolist()


def test_shares_of_a_batch_put_together_are_the_batch_also_across_epochs(tmp_path):
    source = CorpusSource(small_spec(small_corpus(tmp_path), batch=8))
    step = source.windows // 8  # reaches into the second epoch
    whole = source.batch(step, WHOLE, torch.Generator())
    shares = [Share(rank, 2, micro, 2) for rank in range(2) for micro in range(2)]
    parts = [source.batch(step, share, torch.Generator()) for share in shares]
    for i in range(2):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


def test_a_corpus_is_named_by_its_content_and_not_by_its_place(tmp_path):
    first, second = small_corpus(tmp_path / "a"), small_corpus(tmp_path / "b")
    assert first == second
    assert RunSpec(first).id == RunSpec(second).id != RunSpec(replace(first, context=8)).id
    assert task(f"corpus:{tmp_path / 'a'}").vocab_size == VOCABULARY


def test_changed_data_are_refused(tmp_path):
    corpus = small_corpus(tmp_path)
    write_shards(tmp_path, {"train": cycling_documents(20, 5), "heldout": [[1]]}, VOCABULARY, END)
    fresh = Corpus(str(tmp_path) + "/", corpus.sha256, vocabulary=VOCABULARY)  # another name, opened anew
    with pytest.raises(UserError, match=r"has changed: the SHA-256 of its index is .* expected"):
        _ = fresh.shards


def test_a_vocabulary_may_be_raised_and_not_lowered(tmp_path):
    assert small_corpus(tmp_path, vocabulary=64).n_classes == 64
    with pytest.raises(UserError, match="vocabulary is 5, expected at least 17"):
        CorpusSource(small_spec(small_corpus(tmp_path, vocabulary=5)))


@pytest.mark.parametrize(
    ("fields", "training", "message"),
    [
        ({"context": 5000}, {}, r"has \d+ training tokens, expected more than the context 5000"),
        ({}, {"train_lengths": (8, 8)}, r"train_lengths is \(8, 8\), expected the corpus' context"),
        ({}, {"train_samples": 64}, "train_samples is 64, but a corpus brings its own"),
    ],
)
def test_what_a_corpus_cannot_train_on_is_refused_at_the_start(tmp_path, fields, training, message):
    with pytest.raises(UserError, match=message):
        CorpusSource(small_spec(small_corpus(tmp_path, **fields), **training))


def test_a_corpus_without_held_out_text_is_refused_at_the_start(tmp_path):
    write_shards(tmp_path, {"train": cycling_documents(20, 5)}, VOCABULARY, END)
    with pytest.raises(UserError, match="no held-out split to evaluate on"):
        CorpusSource(small_spec(Corpus(str(tmp_path), context=16)))


def test_damaged_shards_stop_a_run_before_its_first_step(tmp_path):
    spec = small_spec(small_corpus(tmp_path / "data"))
    path = tmp_path / "data/train-00003.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(UserError, match=r"train-00003\.bin is damaged"):
        run(spec, tmp_path / "out", Options(**QUIET))


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("mixer", ["deltanet", "mamba"])
def test_a_small_model_learns_and_a_resumed_run_ends_with_the_same_bytes(tmp_path, reset, mixer):
    model = model_config(mixer, d_model=16)
    spec = replace(small_spec(small_corpus(tmp_path / "data", reset=reset), steps=24), model=model).resolved()
    done = run(spec, tmp_path / "whole", Options(**QUIET))
    rows = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert done["metrics"]["heldout_loss"] < rows[0]["loss"]

    class Stop(Exception):
        pass

    def die(step, row):
        if step >= 12:
            raise Stop

    with pytest.raises(Stop):
        run(spec, tmp_path / "cut", Options(checkpoint_seconds=0.0, progress=die, **QUIET))
    run(spec, tmp_path / "cut", Options(**QUIET))
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_held_out_numbers_are_those_of_logits_computed_at_once(tmp_path):
    spec = small_spec(small_corpus(tmp_path))
    model = build_model(spec)
    row = evaluate(model, spec, CPU)
    losses, targets = {}, []
    for split in ("heldout", "heldout-short"):
        tokens = torch.from_numpy(spec.task.shards.read(split, 0, spec.task.shards.tokens(split)).astype(int))
        length = min(16, len(tokens) - 1)
        chosen = torch.randperm(
            (len(tokens) - 1) // length, generator=torch.Generator().manual_seed(20241101)
        )
        starts = chosen[:8, None] * length + torch.arange(length + 1)
        logits = model(tokens[starts[:, :-1]])[0]
        targets.append(tokens[starts[:, 1:]].flatten())
        losses[split] = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), tokens[starts[:, 1:]], reduction="none"
        )
        assert row["by_split"][split]["loss"] == pytest.approx(losses[split].mean().item(), rel=1e-5)
    every = torch.cat([x.flatten() for x in losses.values()])
    assert row["heldout_loss"] == pytest.approx(every.mean().item(), rel=1e-5)
    counts = np.unique(torch.cat(targets), return_counts=True)[1] / len(every)
    assert row["frequency_loss"] == pytest.approx(-(counts * np.log(counts)).sum())
    early = torch.cat([x[:, :4].flatten() for x in losses.values()]).mean().item()
    assert row["perplexity"]["4"] == pytest.approx(math.exp(early), rel=1e-5)
    assert list(row["by_split"]["heldout-short"]["perplexity"]) == ["4"]  # it has four targets


def test_with_reset_held_out_numbers_are_those_of_documents_from_an_empty_state(tmp_path):
    spec = small_spec(small_corpus(tmp_path, reset=True))
    spec = replace(spec, evaluation=replace(spec.evaluation, eval_samples=100, eval_lengths=(4, 64)))
    model, shards = build_model(spec), spec.task.shards
    row = evaluate(model, spec, CPU)
    losses = []
    bounds = shards.documents("heldout")
    for start, stop in itertools.pairwise(bounds):
        tokens = torch.tensor([[END, *shards.read("heldout", start, stop - start).tolist()]])
        losses.append(
            torch.nn.functional.cross_entropy(model(tokens[:, :-1])[0][0], tokens[0, 1:], reduction="none")
        )
    assert row["by_split"]["heldout"]["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    early = torch.cat([loss[:4] for loss in losses]).mean().item()
    assert row["by_split"]["heldout"]["perplexity"]["4"] == pytest.approx(math.exp(early), rel=1e-5)


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_share_the_evaluation(tmp_path, ranks):
    """Each rank's sums, added up by hand, are those of one process; with five, some have nothing to do."""

    class Rank(Ranks):
        def __init__(self, rank):
            self.rank, self.size, self.sums = rank, ranks, []

        def sum(self, x):
            self.sums.append(x)
            return x

    spec = small_spec(small_corpus(tmp_path))
    model, all_ranks = build_model(spec), [Rank(rank) for rank in range(ranks)]
    for rank in all_ranks:
        evaluate(model, spec, CPU, rank)
    total = torch.stack([torch.stack(rank.sums) for rank in all_ranks]).sum((0, 1))
    whole = evaluate(model, spec, CPU)
    assert (total[0].sum() / total[1].sum()).item() == pytest.approx(whole["heldout_loss"], rel=1e-6)


@pytest.mark.parametrize("mixer", ["deltanet", "mamba"])
def test_with_reset_the_loss_is_that_of_every_document_by_itself(tmp_path, mixer):
    spec = replace(small_spec(small_corpus(tmp_path, reset=True)), model=model_config(mixer, d_model=16))
    source, model = CorpusSource(spec), build_model(spec)
    batch = source.batch(0, WHOLE, torch.Generator())
    tokens, options, _ = NextTokens(spec, model)(batch)
    alone = torch.zeros(())
    for inputs, targets in zip(*batch, strict=True):
        cuts = sorted({0, 16, *(inputs == END).nonzero()[:, 0].tolist()})
        for a, b in itertools.pairwise(cuts):
            alone = alone + model(inputs[None, a:b], targets=targets[None, a:b])[0]
    torch.testing.assert_close(model(tokens, **options)[0], alone, rtol=1e-5, atol=1e-4)


def test_packed_bounds_have_one_shape_whatever_the_batch(tmp_path):
    spec = small_spec(small_corpus(tmp_path, reset=True), batch=7, steps=1000)
    source, read = CorpusSource(spec), NextTokens(spec, build_model(spec))
    bounds = [read(source.batch(s, WHOLE, torch.Generator()))[1]["packing"].cu_seqlens for s in range(200)]
    assert len({len(b) for b in bounds}) == 1
    assert all(b[0] == 0 and b[-1] == 7 * 16 and (b.diff() >= 0).all() for b in bounds)
    for step, b in enumerate(bounds):
        inputs = source.batch(step, WHOLE, torch.Generator()).inputs
        inputs[:, 0] = END
        assert len(set(b.tolist())) - 1 == (inputs == END).sum()


def test_reset_needs_mixers_that_pack(tmp_path):
    spec = replace(
        small_spec(small_corpus(tmp_path, reset=True)), model=model_config("diagonal-toy", d_model=16)
    )
    with pytest.raises(UserError, match="reset needs mixers that take packed sequences"):
        NextTokens(spec, build_model(spec))


@pytest.mark.parametrize("reset", [False, True])
def test_micro_batches_give_the_step_of_the_whole_batch(tmp_path, reset):
    spec = small_spec(small_corpus(tmp_path, reset=reset))
    source = CorpusSource(spec)
    whole = GraphStep(spec, new_state(spec, CPU), source, print)
    cut = ShardedStep(spec, new_state(spec, CPU), source, Ranks(), None, 2)
    for _ in range(3):
        whole(), cut()
    torch.testing.assert_close(cut.state.loss_sum, whole.state.loss_sum, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(cut.state.model.parameters(), whole.state.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_spec_file_runs_from_the_command_line(tmp_path, capsys):
    small_shards(tmp_path / "data")
    spec = small_spec(task(f"corpus:{tmp_path / 'data'}"), steps=2)
    spec = replace(
        spec, task=replace(spec.task, context=16), training=replace(spec.training, train_lengths=None)
    )
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()))
    run_main([str(tmp_path / "spec.json"), "--out", str(tmp_path / "out"), "--device", "cpu"])
    printed = capsys.readouterr().out
    assert "heldout" in printed
    assert "ppl@16" in printed
    spec_there, model = load_run(tmp_path / "out")
    assert spec_there == spec.resolved()
    assert model.head.out_features == VOCABULARY


def test_rows_of_text_print_as_one_line(capsys):
    print_row(
        5, {"loss": 2.0, "heldout_loss": 2.5, "perplexity": {"128": 12.5, "256": 11.25}, "by_split": {}}
    )
    assert (
        capsys.readouterr().out == "step       5  loss 2.0000  heldout 2.5000  ppl@128 12.50  ppl@256 11.25\n"
    )
    print_row(5, {"loss": 2.0, "heldout_loss": 2.5, "frequency_loss": 3.25, "perplexity": {}})
    assert "heldout 2.5000 (frequencies alone 3.2500)" in capsys.readouterr().out
