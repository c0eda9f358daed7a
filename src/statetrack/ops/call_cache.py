"""What shapes, dtypes and devices alone decide, decided once: a call repeats with the same ones."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)
CAPACITY = 4096  # things kept under keys of their own


def signature(*tensors: Any) -> tuple | None:
    """Shapes, dtypes and devices. None, which is no key, where torch.compile or fake tensors have symbols."""
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
    """What was made for a key, for when the key comes again; all is forgotten when it grows too large."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get_or_make(self, key: Hashable | None, make: Callable[[], Any]) -> Any:
        """What is kept under `key`, made first if need be; made for this call only without a key."""
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
