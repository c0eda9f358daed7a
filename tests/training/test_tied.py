"""Runs of tied models: what is saved, resumed and shared between processes."""

from dataclasses import replace

import pytest
import torch

from statetrack.files import load_tensors
from statetrack.layers import model_config
from statetrack.run import load_run, run
from statetrack.training import Options
from statetrack.training.ranks import Ranks
from statetrack.training.sharded_step import ShardedStep, shard
from statetrack.training.source import source_of
from statetrack.training.state import new_state
from statetrack.training.store import FileStore

CPU = torch.device("cpu")


@pytest.fixture
def tied_spec(small_spec):
    return replace(small_spec, model=model_config("deltanet", d_model=16, layers=2, heads=2, tied=True))


def test_a_tied_run_saves_its_table_once_and_loads_it_into_both_places(tied_spec, tmp_path):
    run(tied_spec, tmp_path / "run", Options("cpu", say=lambda line: None))
    weights, _ = load_tensors(tmp_path / "run" / "model.safetensors")
    assert "embedding.weight" in weights
    assert "head.weight" not in weights
    _, model = load_run(tmp_path / "run")
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, weights["embedding.weight"])


def test_a_checkpoint_of_a_tied_run_restores_weights_and_moments(tied_spec, tmp_path):
    state = new_state(tied_spec, CPU)
    step = ShardedStep(tied_spec, state, source_of(tied_spec, CPU), Ranks(), None, 1)
    step()
    store = FileStore(tmp_path, "a run", print)
    store.save(state, rows=0)
    restored = store.load_latest(lambda: new_state(tied_spec, CPU), [])
    assert restored is not None
    assert restored.model.head.weight is restored.model.embedding.weight
    step()
    ShardedStep(tied_spec, restored, source_of(tied_spec, CPU), Ranks(), None, 1)()
    for (name, a), (_, b) in zip(
        state.model.named_parameters(), restored.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.fixture
def one_process():
    """torch.distributed with this process alone in it."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "zero2"])
def test_sharded_steps_keep_the_tie(parallel, recompute, tied_spec, one_process):
    results = []
    for kind in (None, parallel):
        state = new_state(tied_spec, CPU, lambda model, kind=kind: shard(model, kind))
        state.model.checkpoint_activations = recompute
        step = ShardedStep(tied_spec, state, source_of(tied_spec, CPU), Ranks(), kind, 1)
        for _ in range(3):
            step()
        assert state.model.head.weight is state.model.embedding.weight
        names = [name for name, _ in state.model.named_parameters()]
        assert "head.weight" not in names
        results.append((state.model.state_dict(), float(state.loss_sum)))
    (plain, loss), (sharded, its_loss) = results
    assert loss == pytest.approx(its_loss, rel=1e-6)
    assert plain.keys() == sharded.keys()
    for name, value in sharded.items():
        whole = value.full_tensor() if parallel != "ddp" else value
        torch.testing.assert_close(whole, plain[name], rtol=1e-5, atol=1e-6)
