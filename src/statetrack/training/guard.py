"""The guard of a run: it ends at a loss that is no number, or jumps, before such a state is saved.

Every checkpoint has passed it, so the newest one is good: nothing is written while the loss since the last
row of metrics is infinite, NaN or a spike, or a weight is no finite number.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from statetrack.errors import Diverged
from statetrack.training.ranks import Ranks
from statetrack.training.state import TrainingState

ROWS = 20  # the median of this many rows is what a spike is measured against
FEWEST = 5  # rows, before there is a median to speak of


class Guard:
    """Raises Diverged, on every rank, with the newest checkpoint in the message.

    A spike is a mean loss more than `spike` above the median of the last 20 rows; 0 allows any.
    """

    def __init__(self, spike: float, newest: Callable[[], Path | None], ranks: Ranks):
        self.spike, self.newest, self.ranks = spike, newest, ranks

    def check_loss(self, loss: float, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """`loss` is the mean since the last of `rows`, at `step`."""
        if not math.isfinite(loss):
            raise Diverged(f"The loss is {loss} at step {step}. Try a smaller --lr. {self._kept()}")
        before = [row["loss"] for row in rows[-ROWS:]]
        if self.spike and len(before) >= FEWEST and loss > median(before) + self.spike:
            raise Diverged(
                f"The loss jumped to {loss:.4f} at step {step}, from a median of {median(before):.4f} in the "
                f"last {len(before)} rows; the limit is {self.spike} above it. {self._kept()} The same "
                "command goes on from there and meets the same data: try a smaller --lr in another folder, "
                "or a larger --spike (0: any) to train through it."
            )

    def check_weights(self, state: TrainingState) -> None:
        """The step after a finite loss may still have made a weight NaN."""
        parts = [part for p in state.model.parameters() if (part := _local(p.detach())).numel()]
        largest = torch.nn.utils.get_total_norm(parts, math.inf)
        (broken,) = self.ranks.agree(not bool(largest.isfinite()))
        if broken:
            raise Diverged(
                f"A weight is infinite or NaN after step {state.step}. Try a smaller --lr. {self._kept()}"
            )

    def _kept(self) -> str:
        newest = self.newest()
        return f"The last good checkpoint is {newest}." if newest else "There is no checkpoint before it."


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter that may be sharded."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[attr-defined]
