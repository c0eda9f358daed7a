"""The queue on a cluster: a machine that goes away takes no run with it."""

import json
import threading
import time
from dataclasses import replace

import pytest

from statetrack.layers import model_config
from statetrack.spec import EvaluationConfig, RunSpec, TrainingConfig
from statetrack.sweep import Job, Monitor
from statetrack.tasks import task

ray = pytest.importorskip("ray")
# Ray's own sockets and warnings are not ours to silence one by one.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SPEC = RunSpec(
    task("parity-dense"),
    model_config("deltanet-no-conv", d_model=8, heads=2),
    TrainingConfig(steps=400, batch=4, train_lengths=(8, 8), log_every=50),
    EvaluationConfig(eval_lengths=(8,), eval_samples=4),
)


class Count(Monitor):
    def __init__(self):
        self.ended = []

    def finished(self, job, seconds):
        self.ended.append(job.label)


@pytest.fixture
def cluster():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster, second
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_every_run_finishes_once_though_a_node_is_removed(cluster, tmp_path):
    from statetrack.integrations.ray import ray_sweep

    cluster, second = cluster
    specs = [replace(SPEC, seed=seed).resolved() for seed in range(4)]
    broken = replace(SPEC, training=replace(SPEC.training, lr=1e30, warmup=0.0, clip=0.0)).resolved()
    jobs = [Job(f"seed {spec.seed}", spec, tmp_path / spec.id) for spec in specs]
    jobs.append(Job("diverges", broken, tmp_path / broken.id))
    removed = threading.Event()

    def remove():
        busy = lambda: ray.available_resources().get("CPU", 0) == 0  # noqa: E731  both nodes have a run
        deadline = time.monotonic() + 30
        while not busy() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.0)
        cluster.remove_node(second, allow_graceful=False)
        removed.set()

    thread = threading.Thread(target=remove)
    thread.start()
    monitor = Count()
    failures = ray_sweep(jobs, cluster.address, device="cpu", monitor=monitor)
    thread.join()
    assert removed.is_set()
    assert sorted(monitor.ended) == [f"seed {i}" for i in range(4)]
    assert [(failure.job.label, "The loss is" in failure.reason) for failure in failures] == [
        ("diverges", True)
    ]
    assert "error: The loss is" in (tmp_path / broken.id / "run.log").read_text()
    for spec in specs:
        done = json.loads((tmp_path / spec.id / "done.json").read_text())
        assert (done["id"], done["metrics"]["step"]) == (spec.id, 400)
        assert (tmp_path / spec.id / "model.safetensors").exists()

    again = Count()
    assert ray_sweep(jobs[:4], cluster.address, device="cpu", monitor=again) == []
    assert again.ended == []
