"""Several processes as one run: who writes, what is decided together, and how processes find each other.

A process alone is a `Ranks` of size 1, where nothing is asked of anyone and torch.distributed is not loaded.
Under torchrun each process is one of `Processes`: rank 0 alone prints and writes files; a decision (stop,
save) is the same on every rank at the same step; an error of one rank is raised on all, so that none waits
forever.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from statetrack.errors import Diverged, Interrupted, UserError

T = TypeVar("T")
Parallel = Literal["ddp", "fsdp", "zero2"]
PARALLEL = ("ddp", "fsdp", "zero2")


class Ranks:
    """One process, which is the first and the only one."""

    rank, size = 0, 1
    distributed = False  # whether torch.distributed connects the ranks, be it one

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def on_first(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, where alone it is done; its error is raised on every rank."""
        return work()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """An error of one rank in this block becomes an error of all at its end."""
        yield

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag, true on every rank if it is true on one."""
        return flags

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of a tensor of one shape."""
        return x

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        return [value]

    def send_from_first(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that rank 0 has, on the CPU of every rank."""
        return tensors

    def device(self, device: torch.device) -> torch.device:
        """The device of this rank among those of its kind."""
        return device


class Processes(Ranks):
    """One of several processes that torchrun started. Use `start_processes`."""

    distributed = True

    def __init__(self, rank: int, size: int, local_rank: int):
        self.rank, self.size, self.local_rank = rank, size, local_rank

    def on_first(self, work: Callable[[], T]) -> T:
        outcome: tuple[Any, type | None, str] = (None, None, "")
        failed = None
        if self.is_first:
            try:
                outcome = work(), None, ""
            except Exception as error:
                outcome, failed = (None, type(error), str(error)), error
        value, kind, message = self._broadcast(outcome)
        if failed is not None:
            raise failed
        if kind is not None:
            raise _same_error(kind, message)
        return value

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        failed = None
        try:
            yield
        except Exception as error:
            failed = error
        found = self.gather(failed and (type(failed), str(failed)))
        first = next((entry for entry in found if entry), None)
        if failed is not None and first == (type(failed), str(failed)):
            raise failed
        if first is not None:
            raise _same_error(*first)

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        from torch import distributed

        asked = torch.tensor(flags, dtype=torch.uint8)
        distributed.all_reduce(asked, distributed.ReduceOp.MAX)
        return tuple(bool(flag) for flag in asked.tolist())

    def sum(self, x: Tensor) -> Tensor:
        from torch import distributed

        total = x.clone()
        distributed.all_reduce(total)
        return total

    def gather(self, value: T) -> list[T]:
        from torch import distributed

        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found

    def send_from_first(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from torch import distributed

        shapes = self._broadcast([(name, tuple(x.shape), x.dtype) for name, x in tensors.items()])
        sent = {}
        for name, shape, dtype in shapes:
            sent[name] = tensors[name] if self.is_first else torch.empty(shape, dtype=dtype)
            distributed.broadcast(sent[name], 0)
        return sent

    def device(self, device: torch.device) -> torch.device:
        return torch.device("cuda", self.local_rank) if device.type == "cuda" else device

    def _broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        from torch import distributed

        box = [value if self.is_first else None]
        distributed.broadcast_object_list(box, 0)
        return box[0]


def _same_error(kind: type, message: str) -> BaseException:
    """The error of another rank, as one of ours, so that the process ends in the same way."""
    try:
        return kind(message)
    except TypeError:  # one that wants more than a message
        return RuntimeError(f"{kind.__name__} on another rank: {message}")


def under_torchrun() -> bool:
    return "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_process() -> bool:
    """Whether this process prints: the one there is, or rank 0 of torchrun's."""
    return not under_torchrun() or int(os.environ["RANK"]) == 0


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Under torchrun, end the process after the block without the shutdown of the interpreter.

    Threads of gloo abort now and then in that shutdown ("terminate called without an active exception", seen
    with PyTorch 2.13), long after the process group was destroyed and every file was written; torchrun would
    report a finished run as failed. Errors keep their traceback and their exit code.
    """
    if not under_torchrun():
        yield
        return
    code = 0
    try:
        yield
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def start_processes(device: torch.device) -> Iterator[Ranks]:
    """The process group that torchrun's environment describes: gloo on CPUs, and NCCL beside it on GPUs."""
    from torch import distributed

    ranks = Processes(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    if device.type == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield ranks
        ranks.agree(True)
    except (UserError, Interrupted, Diverged):
        # raised on every rank: wait for all, or torchrun would kill the slower ones before they have spoken
        ranks.agree(True)
        raise
    finally:
        distributed.destroy_process_group()
