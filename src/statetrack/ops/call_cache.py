"""A cache of what depends on shapes, dtypes and devices alone: most calls repeat those of an earlier one."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)
CAPACITY = 4096  # entries


def signature(*tensors: Any) -> tuple | None:
    """Shapes, dtypes and devices; None, which is no key, under torch.compile and for fake tensors."""
    if torch.compiler.is_compiling():
        return None
    found: list = []
    for x in tensors:
        if type(x) in _PLAIN:
            found += (x.shape, x.dtype, x.device)
        elif x is None:
            found.append(None)
        else:
            return None
    return tuple(found)


class CallCache:
    """Values by key, made when first asked for; emptied when it reaches CAPACITY."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get_or_make(self, key: Hashable | None, make: Callable[[], Any]) -> Any:
        """The value of `key`, made if it is not there yet; without a key it is made and not kept."""
        if key is None:
            return make()
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= CAPACITY:
                self.clear()
            found = self._made[key] = make()
        return found

    def clear(self) -> None:
        self._made.clear()
