"""Checkpoints: everything a run needs to resume exactly where it stopped, in one safetensors file.

The file holds whole tensors whatever the number of processes, so a run saved by two processes can be resumed
by one. Rank 0 gathers and writes them: models must fit its memory.
"""

import re
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from statetrack.errors import UserError
from statetrack.files import DamagedFile, load_tensors, save_tensors
from statetrack.training.ranks import Ranks
from statetrack.training.state import TrainingState

KEEP = 2  # the newest, and the one before it in case the newest is damaged
WEIGHTS = "model.safetensors"  # the final ones


class FileStore:
    """checkpoint-<step>.safetensors in the folder of the run `run`, and in the end model.safetensors.

    `about` goes into the metadata of the final weights.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        say: Callable[[str], None],
        ranks: Ranks | None = None,
        about: dict[str, str] | None = None,
    ):
        self.folder, self.run, self.say, self.about = folder, run, say, about
        self.ranks = Ranks() if ranks is None else ranks

    def save(self, state: TrainingState, rows: int) -> None:
        """Write the checkpoint of the state, then drop all but the newest two."""
        tensors = {f"model.{name}": p for name, p in state.model.state_dict().items()}
        for i, moments in state.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": value for name, value in moments.items()}
        tensors |= {"generator": state.generator.get_state(), "loss_sum": state.loss_sum}
        path = self.folder / f"checkpoint-{state.step:09d}.safetensors"
        metadata = {"step": str(state.step), "device": state.device.type, "format": "2"}
        metadata |= {"run": self.run, "rows": str(rows)}
        whole = _gathered(tensors, self.ranks)
        self.ranks.on_first(lambda: self._write(path, whole, metadata))

    def _write(self, path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        save_tensors(path, tensors, metadata)
        # later ones could not be used, or this run would have gone on from them
        later = [p for p in checkpoints(self.folder) if _step_of(p) > _step_of(path)]
        for old in (*later, *checkpoints(self.folder)[len(later) + KEEP :]):
            old.unlink(missing_ok=True)

    def load_latest(self, new_state: Callable[[], TrainingState], rows: list[int]) -> TrainingState | None:
        """A new state with the values of the newest complete checkpoint of this run; None if there is none.

        Damaged checkpoints and those of other runs are reported and skipped.
        """
        found = self.ranks.on_first(lambda: [path.name for path in checkpoints(self.folder)])
        for name in found:
            state = new_state()  # one that could not be restored may be half another
            try:
                tensors, metadata = self._read(self.folder / name)
                _check_device(self.folder / name, metadata.get("device"), state)
                _check_place(self.folder / name, metadata, self.run, rows)
                _restore(state, tensors, int(metadata["step"]))
            except (DamagedFile, KeyError, ValueError, RuntimeError) as error:
                if isinstance(error, UserError):
                    raise
                missing = f"it has no {error}" if isinstance(error, KeyError) else error
                self.say(f"{name} cannot be used and is passed over: {missing}")
                continue
            return state
        if found:
            self.say("No checkpoint can be used: starting from step 0.")
        return None

    def _read(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The file's tensors and metadata, read on rank 0 and sent to the others."""
        tensors: dict[str, Tensor] = {}

        def read() -> dict[str, str]:
            found, metadata = load_tensors(path)
            tensors.update(found)
            return metadata

        metadata = self.ranks.on_first(read)
        return self.ranks.send_from_first(tensors), metadata

    def finish(self, state: TrainingState) -> None:
        """Write the weights as model.safetensors."""
        weights = _gathered(state.model.state_dict(), self.ranks)
        self.ranks.on_first(lambda: save_tensors(self.folder / WEIGHTS, weights, self.about))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    found = [p for p in folder.glob("checkpoint-*.safetensors") if re.fullmatch(r"checkpoint-\d+", p.stem)]
    return sorted((p for p in found if p.is_file()), reverse=True)


def _step_of(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _gathered(tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Whole tensors on rank 0; elsewhere nothing, but every rank must call this."""
    if not ranks.distributed:
        return tensors
    from torch.distributed.tensor import DTensor

    whole = {}
    for name, x in tensors.items():
        x = x.full_tensor() if isinstance(x, DTensor) else x  # every rank has its part in this
        if ranks.is_first:
            whole[name] = x.cpu()
    return whole


def _placed_as(parameter: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor cut as the parameter is, which may be sharded."""
    if type(parameter) in (Tensor, nn.Parameter):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return whole
    whole = whole.to(parameter.device, parameter.dtype)
    # every rank has the whole tensor, so nothing needs to be sent
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _check_device(path: Path, device: str | None, state: TrainingState) -> None:
    """A CPU and a GPU draw different numbers from one seed, so a run must go on where it began."""
    here = state.device.type
    if device not in (None, here):
        raise UserError(
            f"{path} was written by a run on {device}, this one is on {here}, where training data differ. "
            f"Use --device {device}, or another --out."
        )


def _check_place(path: Path, metadata: dict[str, str], run: str, rows: list[int]) -> None:
    """A checkpoint must be what its name says, of this run, and find the metrics it left."""
    step, before = int(metadata["step"]), int(metadata["rows"])
    if step != _step_of(path):
        raise ValueError(f"it is of step {step}")
    if metadata["run"] != run:
        raise ValueError(f"it is of another run, {metadata['run']}")
    there = sum(row <= step for row in rows)
    if there != before:
        raise ValueError(f"metrics.jsonl has {there} of the {before} rows before it")


def _restore(state: TrainingState, tensors: dict[str, Tensor], step: int) -> None:
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    expected = state.model.state_dict()
    if {k: v.shape for k, v in weights.items()} != {k: v.shape for k, v in expected.items()}:
        raise ValueError("its weights are those of another model")
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".")
            value = value if name == "step" else _placed_as(parameters[int(index)], value)
            moments.setdefault(int(index), {})[name] = value
    state.model.load_state_dict({name: _placed_as(expected[name], x) for name, x in weights.items()})
    groups = state.optimizer.state_dict()["param_groups"]
    state.optimizer.load_state_dict({"state": moments, "param_groups": groups})
    state.generator.set_state(tensors["generator"])
    state.loss_sum.copy_(tensors["loss_sum"])
    state.step = step
