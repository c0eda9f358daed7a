"""What cases on a GPU share: a lower bound on their times, and how they find their peers.

The bound is a roofline model. It counts the operations of the recurrence itself, not of an algorithm: a
chunked form does more operations, on faster units.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from statetrack.errors import UserError


@dataclass(frozen=True)
class Ceilings:
    """Measured peak rates of this GPU, per second."""

    bytes: float  # copied within device memory; reads and writes both count
    float32: float  # operations outside the matrix units: two per multiply-add
    matrix: float  # operations of a bfloat16 matrix product
    exponentials: float  # the special-function units


@dataclass(frozen=True)
class Floor:
    """A lower bound on the time of a case: the larger of moving its bytes and doing its operations."""

    bytes: float
    operations: float
    exponentials: float = 0.0
    matrix: bool = False  # whether the operations can run as matrix products

    def seconds(self, ceilings: Ceilings) -> float:
        rate = ceilings.matrix if self.matrix else ceilings.float32
        return max(
            self.bytes / ceilings.bytes,
            self.operations / rate,
            self.exponentials / ceilings.exponentials,
        )


def peer_module(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        raise UserError(f"{name} cannot be imported, so it is not compared: {error}") from error


def short_name(dtype: torch.dtype) -> str:
    return {torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
