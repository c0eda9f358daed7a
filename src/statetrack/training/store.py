"""Checkpoints: everything a run needs to resume exactly where it stopped.

    FileStore       one safetensors file of whole tensors, which rank 0 gathers and writes: they must fit its
                    memory
    ShardedStore    a folder with a file per rank (`sharded_files.py`), each with that rank's part

Both read the checkpoints of either, at any number of processes. The final weights are one file in any case.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from statetrack.errors import UserError
from statetrack.files import DamagedFile, load_tensors, save_tensors
from statetrack.training import sharded_files
from statetrack.training.initial import WEIGHTS
from statetrack.training.ranks import Ranks
from statetrack.training.state import TrainingState

KEPT = "kept."  # before the names of `TrainingState.kept`
KEEP = 2  # the newest, and the one before it in case the newest is damaged


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
        path = self.folder / f"checkpoint-{state.step:09d}.safetensors"
        whole = _gathered(_tensors_of(state), self.ranks)
        self.ranks.on_first(lambda: save_tensors(path, whole, self._metadata(state, rows)))
        self.ranks.on_first(lambda: self._drop_old(state.step))

    def _metadata(self, state: TrainingState, rows: int) -> dict[str, str]:
        metadata = {"step": str(state.step), "device": state.device.type, "format": "2"}
        return metadata | {"run": self.run, "rows": str(rows)}

    def _drop_old(self, step: int) -> None:
        # later ones could not be used, or this run would have gone on from them
        later = [p for p in checkpoints(self.folder) if _step_of(p) > step]
        for old in (*later, *checkpoints(self.folder)[len(later) + KEEP :]):
            remove(old)

    def newest(self) -> Path | None:
        """The newest checkpoint, damaged or not."""
        return self.ranks.on_first(lambda: next(iter(checkpoints(self.folder)), None))

    def load_latest(self, new_state: Callable[[], TrainingState], rows: list[int]) -> TrainingState | None:
        """A new state with the values of the newest complete checkpoint of this run; None if there is none.

        Damaged checkpoints and those of other runs are reported and skipped.
        """
        found = self.ranks.on_first(lambda: [path.name for path in checkpoints(self.folder)])
        for name in found:
            state = new_state()  # one that could not be restored may be half another
            try:
                self._load(state, self.folder / name, rows)
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

    def _load(self, state: TrainingState, path: Path, rows: list[int]) -> None:
        """Bring a new state to the checkpoint, or raise what is wrong with it."""
        if path.suffix:
            tensors, metadata = self._read(path)
        else:
            tensors, metadata = {}, self.ranks.on_first(lambda: sharded_files.read_manifest(path))
            sharded_files.verify(path, metadata, self.ranks)
        _check_device(path, metadata.get("device"), state)
        _check_place(path, metadata, self.run, rows)
        if path.suffix:
            _restore(state, tensors, int(metadata["step"]))
        else:
            _restore_parts(state, path, int(metadata["step"]), self.ranks)

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


class ShardedStore(FileStore):
    """checkpoint-<step>/ in the folder of the run, a file per rank; in the end model.safetensors."""

    def save(self, state: TrainingState, rows: int) -> None:
        path = self.folder / f"checkpoint-{state.step:09d}"
        sharded_files.write_sharded(path, _tensors_of(state), self._metadata(state, rows), self.ranks)
        self.ranks.on_first(lambda: self._drop_old(state.step))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first: files with a suffix, and folders without."""
    found = [
        p for p in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+(\.safetensors)?", p.name)
    ]
    return sorted((p for p in found if (p.is_file() if p.suffix else p.is_dir())), reverse=True)


def remove(checkpoint: Path) -> None:
    if checkpoint.suffix:
        checkpoint.unlink(missing_ok=True)
    else:
        shutil.rmtree(checkpoint, ignore_errors=True)


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The model's weights in a checkpoint of either kind, whole, without a process group; or DamagedFile."""
    if checkpoint.suffix:
        tensors = load_tensors(checkpoint)[0]
    else:
        tensors = sharded_files.read_sharded(checkpoint, "model.")
    return {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}


def _step_of(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _tensors_of(state: TrainingState) -> dict[str, Tensor]:
    """All that changes while training but the step; this rank's part, where weights are sharded."""
    tensors = {f"model.{name}": p for name, p in state.model.state_dict().items()}
    for i, moments in state.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{name}": value for name, value in moments.items()}
    tensors |= {f"{KEPT}{name}": x for name, x in state.kept.items()}
    return tensors | {"generator": state.generator.get_state(), "loss_sum": state.loss_sum}


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
    _check_shapes({k: v.shape for k, v in weights.items()}, {k: v.shape for k, v in expected.items()})
    parameters = _parameters(state)
    moments: dict[int, dict[str, Tensor]] = {}
    for index, name, key in _moments_in(tensors):
        value = tensors[key] if name == "step" else _placed_as(parameters[index], tensors[key])
        moments.setdefault(index, {})[name] = value
    state.model.load_state_dict({name: _placed_as(expected[name], x) for name, x in weights.items()})
    _set_rest(state, moments, tensors, step)


def _restore_parts(state: TrainingState, path: Path, step: int, ranks: Ranks) -> None:
    """`_restore`, where every rank reads its parts of the tensors straight into their places."""
    shapes = sharded_files.shapes_in(path)
    weights = {f"model.{k}": v for k, v in state.model.state_dict().items()}
    _check_shapes(
        {k: v for k, v in shapes.items() if k.startswith("model.")}, {k: v.shape for k, v in weights.items()}
    )
    parameters = _parameters(state)
    moments: dict[int, dict[str, Tensor]] = {}
    places = weights | {"generator": state.generator.get_state(), "loss_sum": state.loss_sum}
    places |= {f"{KEPT}{name}": x.clone() for name, x in state.kept.items()}
    for index, name, key in _moments_in(shapes):
        value = torch.zeros(()) if name == "step" else torch.zeros_like(parameters[index].detach())
        moments.setdefault(index, {})[name] = places[key] = value
    missing = places.keys() - shapes.keys()
    if missing:
        raise KeyError(min(missing))
    sharded_files.read_into(path, places, ranks)
    _set_rest(state, moments, places, step)


def _parameters(state: TrainingState) -> list[Tensor]:
    """In the order of the optimiser's indices."""
    return [p for group in state.optimizer.param_groups for p in group["params"]]


def _moments_in(names: Any) -> list[tuple[int, str, str]]:
    """Parameter, name and key of what a checkpoint holds of the optimiser."""
    split = ((key, key.split(".")) for key in names if key.startswith("optimizer."))
    return [(int(index), name, key) for key, (_, index, name) in split]


def _check_shapes(found: dict[str, torch.Size], expected: dict[str, torch.Size]) -> None:
    if found != expected:
        raise ValueError("its weights are those of another model")


def _set_rest(
    state: TrainingState, moments: dict[int, dict[str, Tensor]], tensors: dict[str, Tensor], step: int
) -> None:
    """What is left once the weights are in place."""
    groups = state.optimizer.state_dict()["param_groups"]
    state.optimizer.load_state_dict({"state": moments, "param_groups": groups})
    state.generator.set_state(tensors["generator"])
    state.loss_sum.copy_(tensors["loss_sum"])
    for name, x in state.kept.items():
        x.copy_(tensors[f"{KEPT}{name}"])
    state.step = step
