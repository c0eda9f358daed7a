"""Conversion of user input: arrays, tensors and lists of matrices, dtypes under any name, integers."""

import operator
from collections.abc import Collection, Mapping

import numpy as np

from statetrack.errors import UserError


def real_array(value: object, where: str, what: str) -> tuple[np.ndarray, float]:
    """The numbers in float64, and the relative spacing (eps) of the format they came in."""
    try:
        array = np.asarray(_plain(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: expected {what} as an array, or as lists of equal length.") from error
    if array.dtype.kind not in "biuf":
        raise UserError(f"{where}: {what} has dtype {array.dtype}, expected real numbers.")
    eps = np.finfo(np.float64).eps
    if array.dtype.kind == "f":
        eps = max(eps, _eps(value), np.finfo(array.dtype).eps)
    with np.errstate(over="ignore"):
        array = array.astype(np.float64)
    if not np.isfinite(array).all():
        place = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise UserError(f"{where}: entry {place} of {what} is {array[place]}, which is not finite.")
    return array, float(eps)


def _plain(value: object) -> object:
    """Tensors, also inside lists, as numpy arrays without gradient."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()  # type: ignore[attr-defined]
        # numpy has no bfloat16; float64 represents every narrower format exactly.
        return (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _eps(value: object) -> float:
    """The coarsest spacing among the tensors in a value; `_plain` widens them."""
    if hasattr(value, "detach"):
        import torch

        return torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0  # type: ignore[attr-defined]
    return max(map(_eps, value), default=0.0) if isinstance(value, list | tuple) else 0.0


def dtype_name(dtype: object) -> str:
    """float32 for "float32", torch.float32, np.float32 and np.dtype("float32")."""
    if isinstance(dtype, type | np.dtype):
        try:
            return np.dtype(dtype).name
        except TypeError:
            return str(dtype)
    return str(dtype).removeprefix("torch.")


def whole_number(value: object) -> int | None:
    """The value as an int if it is of any integer type; None otherwise, also for bools."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def is_permutation(images: object) -> bool:
    """Whether these are the whole numbers 0, 1, ..., n - 1 in some order."""
    if not isinstance(images, Collection) or isinstance(images, Mapping) or getattr(images, "ndim", 1) != 1:
        return False
    return {whole_number(q) for q in images} == set(range(len(images)))
