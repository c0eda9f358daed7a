"""One table for embedding and head: tied weights are one tensor in memory and in files."""

from typing import Any

import torch
from torch import Tensor, nn

TABLE, HEAD = "embedding.weight", "head.weight"


def tie(model: nn.Module, embedding: nn.Embedding, head: nn.Linear) -> None:
    """Let the head of a model read its embedding's table.

    Its state dict holds the table once, as `embedding.weight`; one to be loaded may hold it as `head.weight`
    too, as published checkpoints do, if the two are equal.
    """
    head.weight = embedding.weight
    model.register_state_dict_post_hook(_drop_head)
    model.register_load_state_dict_pre_hook(_read_head_from_table)


def _drop_head(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    state_dict.pop(prefix + HEAD, None)


def _read_head_from_table(model: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    table, head = state_dict.get(prefix + TABLE), state_dict.get(prefix + HEAD)
    if head is None and table is not None:
        state_dict[prefix + HEAD] = table
    elif _differ(table, head):
        errors = rest[-1]
        errors.append(
            f"{prefix}{HEAD} differs from {prefix}{TABLE}, expected one table for both: this model is tied. "
            "Build it with tied=False to load these weights."
        )


def _differ(table: Any, head: Any) -> bool:
    if not isinstance(table, Tensor) or not isinstance(head, Tensor):
        return False
    return table.shape != head.shape or (table is not head and not torch.equal(table, head))
