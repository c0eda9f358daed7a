"""The queue on this machine: worker processes, each with one run or several interleaved."""

import math
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from statetrack.errors import UserError
from statetrack.files import write_json
from statetrack.sweep.jobs import Failure, Job, Monitor, open_jobs, write_diverged
from statetrack.sweep.worker import work
from statetrack.training import Interrupted
from statetrack.training.loop import stop_signals


@dataclass
class _Worker:
    process: BaseProcess
    connection: Any  # a Connection; its type differs by system
    jobs: dict[str, Job] = field(default_factory=dict)  # under way, by folder


def sweep(
    jobs: Iterable[Job],
    workers: int = 1,
    device: str = "auto",
    monitor: Monitor | None = None,
    runs_per_worker: int = 1,
    *,
    seconds: float | None = None,
    order: Callable[[list[Job]], list[Job]] | None = None,
) -> list[Failure]:
    """Carry out every job that is not finished yet; return those that failed.

    Runs that diverged, here or in an earlier call, are failures and are not repeated. A run that another
    process carries out is left to it, and is no failure.
    A worker is a process; with several GPUs the workers are distributed over them. Each worker interleaves
    `runs_per_worker` runs, step by step, on its GPU.
    After `seconds` each worker writes its checkpoints, and the jobs left over are for a later call.
    `order` sorts the jobs that wait, at the start and again whenever a run has ended.
    Ctrl-C lets each worker write its checkpoint and raises Interrupted; the same call resumes from there.
    """
    if workers < 1:
        raise UserError(f"sweep: workers is {workers}, expected at least 1.")
    if runs_per_worker < 1:
        raise UserError(f"sweep: runs_per_worker is {runs_per_worker}, expected at least 1.")
    if seconds is not None and not seconds > 0:
        raise UserError(f"sweep: seconds is {seconds:g}, expected more than 0.")
    until = math.inf if seconds is None else time.monotonic() + seconds
    monitor = monitor or Monitor()
    pending, diverged, finished = open_jobs(jobs)
    total = len(pending) + len(diverged) + finished
    monitor.begun(total, finished, min(workers * runs_per_worker, len(pending)))
    for failure in diverged:
        monitor.failed(failure)
    if not pending:
        return diverged
    threads = max(1, torch.get_num_threads() // min(workers, len(pending)))
    queue = _Queue(pending, monitor, device, threads, runs_per_worker, order)
    with stop_signals() as stop:
        try:
            queue.fill(workers)
            while queue.busy:
                queue.listen()
                if stop.is_set() or time.monotonic() > until:
                    queue.stop()
                queue.fill(workers)
                monitor.tick()
        finally:
            queue.close()
    if stop.is_set():
        left = queue.stopped + len(queue.pending)
        raise Interrupted(f"Stopped with {left} runs to go; the same command goes on from there.")
    return diverged + queue.failures


class _Queue:
    """Jobs waiting, workers busy with up to `at_once` each, and the results of the rest."""

    def __init__(
        self,
        pending: list[Job],
        monitor: Monitor,
        device: str,
        threads: int,
        at_once: int,
        order: Callable[[list[Job]], list[Job]] | None,
    ):
        self.pending, self.monitor = deque(pending), monitor
        self.device, self.threads, self.at_once = device, threads, at_once
        self.order, self.in_order = order or list, False
        self.workers: list[_Worker] = []
        self.failures: list[Failure] = []
        self.stopped, self.stopping = 0, False
        self.context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads half-way

    @property
    def busy(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.jobs]

    def fill(self, workers: int) -> None:
        """Hand out jobs, to idle workers first, starting up to `workers` of them."""
        if not self.in_order:
            self.pending, self.in_order = deque(self.order(list(self.pending))), True
        while self.pending and not self.stopping:
            worker = min(self.workers, key=lambda w: len(w.jobs), default=None)
            if (worker is None or worker.jobs) and len(self.workers) < workers:
                worker = self._start()
            if worker is None or len(worker.jobs) >= self.at_once:
                return
            job = self.pending.popleft()
            if not (job.folder / "spec.json").exists():  # there to be read even if the run dies at once
                write_json(job.folder / "spec.json", job.spec.to_dict())
            worker.jobs[str(job.folder)] = job
            self.monitor.started(job)
            worker.connection.send((job.spec.to_dict(), str(job.folder)))

    def _start(self) -> _Worker:
        here, there = self.context.Pipe()
        device = _device_of(len(self.workers), self.device)
        process = self.context.Process(target=work, args=(there, device, self.threads), daemon=True)
        process.start()
        there.close()  # ours is the only other end, so that a dead worker reads as the end of the file
        worker = _Worker(process, here)
        self.workers.append(worker)
        return worker

    def listen(self, seconds: float = 0.2) -> None:
        """Take the messages that are there."""
        for connection in wait([worker.connection for worker in self.busy], seconds):
            worker = next(w for w in self.workers if w.connection is connection)
            try:
                kind, folder, value = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                self._died(worker)
                continue
            if kind == "step":
                self.monitor.progress(worker.jobs[folder], value)
                continue
            job = worker.jobs.pop(folder)
            self.in_order = False
            if kind == "done":
                self.monitor.finished(job, value)
            elif kind in ("failed", "diverged"):
                if kind == "diverged":
                    write_diverged(job.folder, value)
                self._fail(job, value)
            elif kind == "elsewhere":
                self.monitor.elsewhere(job)
            else:
                self.stopped += 1

    def _died(self, worker: _Worker) -> None:
        """The process is gone without a word: killed for memory, or a crash in a library."""
        worker.process.join()
        self.workers.remove(worker)
        for job in worker.jobs.values():
            if self.stopping:
                self.stopped += 1
            else:
                self._fail(job, f"its process ended with code {worker.process.exitcode}")
        worker.jobs.clear()

    def _fail(self, job: Job, reason: str) -> None:
        failure = Failure(job, reason)
        self.failures.append(failure)
        self.monitor.failed(failure)

    def stop(self) -> None:
        """Ask every busy worker, once, to write its checkpoint and leave."""
        if not self.stopping:
            self.stopping = True
            for worker in self.busy:
                worker.process.terminate()

    def close(self) -> None:
        """End the workers: idle ones by a word, those still busy by force."""
        for worker in self.workers:
            if not worker.jobs and worker.process.is_alive():
                try:
                    worker.connection.send(None)
                except OSError:
                    continue
            else:
                worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.connection.close()


def _device_of(worker: int, device: str) -> str:
    """Worker 0, 1, ... of several GPUs; one device is everybody's."""
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") and torch.cuda.is_available() else 0
    return f"cuda:{worker % gpus}" if gpus > 1 else device
