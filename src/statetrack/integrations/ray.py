"""The queue on several machines: runs are Ray tasks, started again elsewhere when a machine is lost."""

import contextlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from statetrack.errors import RunningElsewhere, UserError, require
from statetrack.files import write_atomically, write_text
from statetrack.plugins import VARIABLE, named_plugins
from statetrack.run_folder import claim
from statetrack.sweep.jobs import Failure, Job, Monitor, open_jobs, write_diverged
from statetrack.training import Interrupted
from statetrack.training.loop import stop_signals

RETRIES = 10  # of a run whose machine went away
GPUS_PER_RUN = 0.25  # where the cluster has GPUs: these models leave most of one idle


def ray_sweep(
    jobs: Iterable[Job],
    address: str,
    gpus_per_run: float | None = None,
    device: str = "auto",
    monitor: Monitor | None = None,
) -> list[Failure]:
    """Carry out the unfinished jobs on the cluster at `address`; results come back into the jobs' folders.

    As `statetrack.sweep.sweep`, which does the same on this machine.
    """
    ray = require("ray", extra="cluster", for_="running on a cluster")
    _connect(ray, address)
    monitor = monitor or Monitor()
    pending, diverged, finished = open_jobs(jobs)
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    gpus = gpus_per_run if gpus_per_run is not None else (GPUS_PER_RUN if has_gpus else 0)
    monitor.begun(len(pending) + len(diverged) + finished, finished, _slots(ray, gpus))
    for failure in diverged:
        monitor.failed(failure)
    remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(carry_out)
    queue = _Queue(ray, remote, device, pending, monitor)
    with stop_signals() as stop:
        while (queue.waiting or queue.running) and not stop.is_set():
            queue.submit(_slots(ray, gpus) + 1)
            queue.collect()
            monitor.tick()
        if stop.is_set():
            left = queue.cancel()
            raise Interrupted(f"Stopped with {left} runs to go; the same command goes on from there.")
    return diverged + queue.failures


def _connect(ray: Any, address: str) -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"no Ray cluster answers at {address!r}: {error}. Start one with `ray start --head`."
        ) from error


def _slots(ray: Any, gpus: float) -> int:
    """How many runs fit on the cluster at once."""
    resources = ray.cluster_resources()
    slots = resources.get("CPU", 1)
    return max(1, int(min(slots, resources.get("GPU", 0) / gpus) if gpus else slots))


class _Queue:
    """Jobs waiting, and those handed to Ray by the reference to their result."""

    def __init__(self, ray: Any, remote: Any, device: str, pending: list[Job], monitor: Monitor):
        self.ray, self.remote, self.device, self.monitor = ray, remote, device, monitor
        self.waiting, self.running = deque(pending), {}
        self.failures: list[Failure] = []

    def submit(self, at_once: int) -> None:
        """Keep a little more than the cluster holds under way, so that no slot waits for the driver."""
        while self.waiting and len(self.running) < at_once:
            job = self.waiting.popleft()
            plugins = ",".join(named_plugins())  # paths must lead to the same files on every machine
            self.running[self.remote.remote(job.spec.to_dict(), job.spec.id, self.device, plugins)] = job
            self.monitor.started(job)

    def collect(self, seconds: float = 0.2) -> None:
        """Write the results that have come back."""
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=seconds)
        for reference in ready:
            job = self.running.pop(reference)
            try:
                kind, value, files = self.ray.get(reference)  # as `carry_out` returns them
            except self.ray.exceptions.RayError as error:
                kind, value, files = "failed", f"{type(error).__name__}: {error}", {}
            try:
                _write(job, files, None if kind == "done" else str(value))
            except RunningElsewhere:  # by a process on this machine, which will write the result
                kind = "elsewhere"
            if kind == "done":
                self.monitor.finished(job, float(value))
            elif kind == "elsewhere":
                self.monitor.elsewhere(job)
            else:
                if kind == "diverged":
                    write_diverged(job.folder, str(value))
                failure = Failure(job, str(value))
                self.failures.append(failure)
                self.monitor.failed(failure)

    def cancel(self) -> int:
        """Ask the running ones to stop, each leaving a checkpoint on its machine; how many runs are left."""
        references = list(self.running)
        for reference in references:
            self.ray.cancel(reference)
        if references:
            self.ray.wait(references, num_returns=len(references), timeout=10)
        return len(self.waiting) + len(references)


def _write(job: Job, files: dict[str, bytes], reason: str | None) -> None:
    """Bring a run's files home: done.json last, as in a run of our own."""
    with claim(job.folder):
        for name in sorted(files, key=lambda name: name == "done.json"):
            write_atomically(job.folder / name, [files[name]])
        if reason is not None and "run.log" not in files:
            write_text(job.log, reason + "\n")


def carry_out(
    spec: dict[str, Any], run_id: str, device: str, plugins: str = ""
) -> tuple[str, Any, dict[str, bytes]]:
    """On a cluster machine: ("done", seconds, files), or "failed" or "diverged" with the reason.

    The folder is one per machine and run: a run that is started again on the same machine finds its
    checkpoint, and never one that a lost twin is still writing.
    """
    import ray

    from statetrack.sweep.worker import carry_out as run_here

    if plugins:
        os.environ[VARIABLE] = plugins
    node = ray.get_runtime_context().get_node_id()[:12]
    folder = Path(tempfile.gettempdir()) / f"statetrack-ray-{os.getuid()}" / node / run_id
    kind, value = run_here(spec, folder, device)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if _comes_home(path, kind)}
    if kind == "stopped":
        raise Interrupted(f"run {run_id} was stopped; its checkpoint is kept in {folder}")
    if kind == "done":
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    return kind, value, files


def _comes_home(path: Path, kind: str) -> bool:
    """Results and logs, not checkpoints or locks; of a failed run what explains it."""
    names = {"spec.json", "run.log", "metrics.jsonl"}
    return path.name in names | ({"model.safetensors", "done.json"} if kind == "done" else set())
