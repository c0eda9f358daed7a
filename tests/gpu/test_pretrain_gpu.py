"""Language models on a GPU: the norm of the gradients from a CUDA graph, and checkpoints in parts."""

import json

import pytest

from statetrack.layers import model_config
from statetrack.lm.shards import write_shards
from statetrack.run import run
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.tasks import Corpus
from statetrack.training import Options

pytestmark = pytest.mark.gpu


@pytest.fixture
def spec(tmp_path):
    documents = [[(7 * i + j) % 250 for j in range(200)] for i in range(40)]
    write_shards(tmp_path / "data", {"train": documents[4:], "heldout": documents[:4]}, 257, 256)
    return RunSpec(
        Corpus(str(tmp_path / "data"), context=128),
        model_config("deltanet", d_model=64, heads=2, layers=2, tied=True),
        TrainingConfig(steps=12, batch=4, log_every=2, precision="bfloat16"),
        EvaluationConfig(eval_samples=2),
    ).resolved()


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_graph_reports_the_norms_of_eager_steps(spec, tmp_path):
    said = []
    for name, graphs in (("graph", True), ("eager", False)):
        run(spec, tmp_path / name, Options("cuda", cuda_graphs=graphs, say=said.append))
    assert said == []
    norms = [[row["grad_norm"] for row in rows(tmp_path / name)] for name in ("graph", "eager")]
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)  # bfloat16
    speeds = rows(tmp_path / "graph", "throughput.jsonl")
    assert all(row["memory_bytes"] > 0 and row["tokens_per_second"] > 0 for row in speeds)


def test_a_run_goes_on_from_a_checkpoint_in_parts(spec, tmp_path):
    class Stop(Exception):
        pass

    def die(step, row):
        if step == 8:
            raise Stop

    folder, said = tmp_path / "cut", []
    parts = {"device": "cuda", "checkpoints": "sharded", "say": said.append}
    with pytest.raises(Stop):
        run(spec, folder, Options(checkpoint_seconds=0.0, progress=die, **parts))
    run(spec, folder, Options(**parts))
    run(spec, tmp_path / "whole", Options("cuda", say=said.append))
    assert said == ["Going on from step 7 of 12."]
    losses = [[row["loss"] for row in rows(path)] for path in (folder, tmp_path / "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # a resumed run's first steps are eager
