"""Rows of metrics as lines of text."""

import math
from datetime import timedelta
from typing import Any

from statetrack.tasks import Automaton, Task


def print_row(step: int, row: dict[str, Any]) -> None:
    """One readable line per row of metrics."""
    parts = [f"step {step:>7}", f"loss {row['loss']:.4f}", *_speed(row)]
    majority = row.get("majority_accuracy", {})
    for length, value in row.get("accuracy", {}).items():
        beside = f" (majority {majority[length]:.3f})" if length in majority else ""
        parts.append(f"acc@{length} {value:.3f}{beside}")
    if "scaled_accuracy" in row:
        parts.append(
            f"scaled {row['scaled_accuracy']:.3f} (majority answer {row['majority_scaled_accuracy']:.3f})"
        )
    if "heldout_loss" in row:
        beside = f" (frequencies alone {row['frequency_loss']:.4f})" if "frequency_loss" in row else ""
        parts.append(f"heldout {row['heldout_loss']:.4f}{beside}")
        parts += [f"ppl@{edge} {value:.2f}" for edge, value in row["perplexity"].items()]
    print("  ".join(parts), flush=True)


def note_on_baseline(row: dict[str, Any], task: Task) -> str | None:
    """A line to print where the most frequent answer alone is nearly always right; None elsewhere."""
    majority = row.get("majority_accuracy", {}).values()
    if not majority or min(majority) < 0.99:
        return None
    note = (
        f"Always giving the most frequent answer scores {min(majority):.3f} or more here, so these accuracies"
    )
    note += " show nothing."
    if isinstance(task, Automaton) and task.words == "uniform":
        note += " Draw words that stay in the language longer: --words live."
    return note


def _speed(row: dict[str, Any]) -> list[str]:
    """What the row of a language model has beside its loss, before it is evaluated."""
    if "tokens_per_second" not in row:
        return []
    parts = [f"ppl {math.exp(min(row['loss'], 700.0)):.2f}", f"lr {row['lr']:.2e}"]
    parts += [f"grad {row['grad_norm']:.3f}"] if "grad_norm" in row else []
    parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    parts += [f"MFU {row['mfu']:.1%}"] if "mfu" in row else []
    left = timedelta(seconds=round(row["seconds_left"]))
    return [*parts, f"{row['memory_bytes'] / 1e9:.1f} GB", f"{left} left"]
