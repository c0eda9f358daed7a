"""statetrack bench: the recurrences against other libraries, on this machine's GPU or CPU."""

import datetime
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from statetrack.commands.flags import parse
from statetrack.errors import UserError
from statetrack.files import write_json
from statetrack.provenance import processor
from statetrack.training.loop import resolve_device

# packages whose versions are recorded with the results, and the module each provides
PEERS = {"transformers": "transformers", "mambapy": "mambapy", "triton": "triton"}
PEERS |= {"flash-linear-attention": "fla", "mamba-ssm": "mamba_ssm"}


@dataclass(frozen=True)
class BenchOptions:
    """Forward and backward of both recurrences, as ratios to the best other library in the same run.

    On a CPU: float32, with peak memory and time by length. On a GPU: called from Python and inside a CUDA
    graph, next to the minimum time the hardware allows, and whole training steps.
    """

    device: str = "auto"  # auto, cpu or cuda
    peers: bool = True  # also run the other libraries, if they are installed
    only: str = ""  # only cases whose name contains all of these words, e.g. "delta_rule bf16"
    threads: int = 2  # on a CPU
    seconds: float = 3.0  # per comparison on a CPU
    growth: bool = True  # on a CPU, also time lengths from 1k to 64k
    cold: bool = False  # on a GPU, start from an empty Triton cache, to time first calls
    ablation: bool = False  # on a GPU, instead: what each small fused kernel gains in a training step
    lm: bool = False  # instead: language models, training steps (on a GPU) and decoding
    json: Path | None = None  # write everything measured to this file, after every case


def main(arguments: Sequence[str]) -> None:
    options = parse(BenchOptions, arguments, "statetrack bench")
    if options.threads < 1 or options.seconds < 0:
        raise UserError(
            f"bench: threads is {options.threads} and seconds {options.seconds}, expected at least 1 and 0."
        )
    bench(options)


def bench(options: BenchOptions) -> None:
    """Measure, print, and write the JSON file if one is asked for."""
    # transformers warns about its PyTorch fallback, which is what is timed here
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    report: dict[str, Any] = {"machine": machine(), "cold": options.cold}
    words = options.only.lower().split()

    def chosen(name: str) -> bool:
        return all(word in name.lower() for word in words)

    def keep(part: dict[str, Any]) -> None:
        if options.json:
            write_json(options.json, report | part)

    def collect(part: dict[str, Any]) -> None:
        """As `keep`, where several parts make one report."""
        report.update(part)
        keep({})

    on_gpu = resolve_device(options.device).type == "cuda"
    if options.ablation:
        if not on_gpu:
            raise UserError("bench: --ablation measures kernels of a GPU, and there is none to use here.")
        from statetrack.bench.ablation import ablation_report

        ablation_report(chosen, keep)
    elif options.lm:
        from statetrack.bench.cases import check_chosen
        from statetrack.bench.lm_decode import CPU_DECODING, GPU_DECODING, decode_report
        from statetrack.bench.lm_step import LM_STEPS, lm_report

        cases = [*LM_STEPS, *GPU_DECODING] if on_gpu else CPU_DECODING
        check_chosen(chosen, [case.name for case in cases])
        if on_gpu:
            with tempfile.TemporaryDirectory() as data:
                lm_report(options.peers, chosen, collect, Path(data))
        else:
            torch.set_num_threads(options.threads)
        decode_report("cuda" if on_gpu else "cpu", options.peers, chosen, collect)
    elif on_gpu:
        from statetrack.bench.gpu_report import gpu_report

        with tempfile.TemporaryDirectory() as empty:
            if options.cold:
                os.environ["TRITON_CACHE_DIR"] = empty
            gpu_report(options.peers, options.cold, chosen, keep)
    else:
        from statetrack.bench.cpu_report import cpu_report

        cpu_report(options.peers, options.threads, options.seconds, options.growth, chosen, keep)
    if options.json:
        print(f"\nWritten to {options.json}")


def machine() -> dict[str, str]:
    """Hardware and package versions of the measurement."""
    found = {"cpu": processor(), "python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    for package, module in PEERS.items():
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "from source" if find_spec(module) else "not installed"
    return found | {"date": datetime.date.today().isoformat()}
