"""Started by torchrun, twice, from test_processes.py: several runs at two processes, one after the other.

Writes the files of each run below the folder it is given, and how each ended into rank-<rank>.json.
"""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from process_specs import CUT, SPEC, file_spec, text_spec

from statetrack.errors import Diverged, Interrupted, UserError
from statetrack.run import run, running
from statetrack.training import Options
from statetrack.training.loop import stop_signals
from statetrack.training.ranks import PARALLEL, leaving_at_once, start_processes


def main(out: Path) -> None:
    torch.set_num_threads(1)
    ended = {}
    with start_processes(torch.device("cpu")) as ranks:

        def options(parallel, **changes):
            changes = {"device": "cpu", "say": lambda text: None, "micro_batches": 2} | changes
            return Options(ranks=ranks, parallel=parallel, **changes)

        for parallel in PARALLEL:
            whole, cut = out / parallel / "whole", out / parallel / "cut"
            run(SPEC, whole, options(parallel))
            ended[f"{parallel}, stopped"] = _outcome(_stop_on_rank_1, cut, options(parallel), ranks)
            if ranks.is_first:
                shutil.copytree(cut, out / parallel / "to one")
            run(SPEC, cut, options(parallel))
            # left there by one process
            run(SPEC, out / parallel / "from one", options(parallel))
            text = out / parallel / "text"
            _outcome(_stop_on_rank_1, text / "cut", options(parallel), ranks, text_spec(out), 5)
            if ranks.is_first:
                shutil.copytree(text / "cut", text / "to one")
            for folder in (text / "cut", text / "whole"):
                run(text_spec(out), folder, options(parallel))
        # whether it is time for a checkpoint is rank 0's to say: if not, they would wait for each other
        seconds = 0.0 if ranks.is_first else 1e9
        run(file_spec(out), out / "file", options("fsdp", checkpoint_seconds=seconds))
        diverging = replace(SPEC, training=replace(SPEC.training, lr=1e30, warmup=0.0, clip=0.0))
        ended["diverged"] = _outcome(run, diverging, out / "diverged", options("ddp"))
        every = options("fsdp", checkpoint_seconds=0.0)
        ended["full disk"] = _outcome(_run_on_a_full_disk, out / "full", every, ranks)
        ended["refused on rank 1"] = _outcome(_refuse_on_rank_1, ranks)
    (out / f"rank-{ranks.rank}.json").write_text(json.dumps(ended))


def _outcome(work, *arguments):
    try:
        work(*arguments)
    except (Diverged, Interrupted, UserError, OSError) as error:
        return [type(error).__name__, str(error)]
    return None


def _refuse_on_rank_1(ranks):
    with ranks.together():
        if ranks.rank == 1:
            raise UserError("rank 1 cannot")


def _stop_on_rank_1(folder, options, ranks, spec=SPEC, cut=CUT):
    """Rank 1 hears SIGTERM after step `cut` - 1, so that the run should end behind the step after it."""
    with stop_signals() as stop:
        for step, _ in enumerate(running(spec, folder, options, stop), 1):
            if step == cut - 1 and ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)


def _run_on_a_full_disk(folder, options, ranks):
    """From the sixth step on rank 1 cannot write its part of a checkpoint."""
    real = os.fsync

    def fail(file):
        if os.readlink(f"/proc/self/fd/{file}").endswith(".safetensors"):
            raise OSError(28, "No space left on device")
        real(file)

    try:
        with stop_signals() as stop:
            for step, _ in enumerate(running(SPEC, folder, options, stop), 1):
                if step == 5 and ranks.rank == 1:
                    os.fsync = fail
    finally:
        os.fsync = real


if __name__ == "__main__":
    with leaving_at_once():
        main(Path(sys.argv[1]))
