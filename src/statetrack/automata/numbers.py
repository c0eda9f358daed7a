"""Numbers as users give them: arrays, tensors and lists of matrices, dtypes under any name, whole numbers."""

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
        # numpy knows no bfloat16, and every narrower format fits into float64.
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
    """The value as an int if it is a whole number of any integer type; None for all else, bools too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def is_permutation(self, letter: str) -> bool:
        """Whether the letter moves no two states to the same one."""
        return len(set(self.transitions[letter])) == self.n_states

    def to_json(self) -> str:
        """The automaton as JSON text, the form `from_json` and `load` read."""
        record = {
            "alphabet": list(self.alphabet),
            "transitions": {letter: list(table) for letter, table in self.transitions.items()},
            "start": self.start,
            "accepting": sorted(self.accepting),
        }
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> "DFA":
        """Read the text of `to_json`; null in a table stands for a missing move."""
        try:
            record = json.loads(text)
        except (json.JSONDecodeError, TypeError) as error:
            raise UserError(f"DFA.from_json: the text is not JSON: {error}.") from error
        fields = ("alphabet", "transitions", "start", "accepting")
        if not isinstance(record, dict) or sorted(record) != sorted(fields):
            found = ", ".join(sorted(map(str, record))) if isinstance(record, dict) else type(record).__name__
            raise UserError(f"DFA.from_json: expected an object with {', '.join(fields)}; found {found}.")
        if not isinstance(record["transitions"], dict) or not isinstance(record["accepting"], list):
            raise UserError("DFA.from_json: expected transitions as an object and accepting as a list.")
        return cls(**record)

    def save(self, path: str | Path) -> None:
        """Write the automaton to a JSON file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "DFA":
        """Read an automaton from a JSON file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"DFA.load: {path} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"DFA.load: {path} is not a text file in UTF-8.") from error

    def to_dot(self) -> str:
        """Graphviz source of the automaton."""
        from statetrack.automata.drawing import dfa_to_dot

        return dfa_to_dot(self)

    def to_svg(self) -> str:
        """A self-contained SVG drawing, made without Graphviz."""
        from statetrack.automata.drawing import dfa_to_svg

        return dfa_to_svg(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DFA) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        ends = f"start {self.start}, accepting {sorted(self.accepting)}"
        return f"DFA({self.n_states} states over {list(self.alphabet)}, {ends})"


def checked_alphabet(alphabet: Iterable[str]) -> tuple[str, ...]:
    """The letters as a tuple; they must be non-empty strings, each given once."""
    if not isinstance(alphabet, Iterable):
        raise UserError(
            f"DFA: the alphabet is {alphabet!r}, expected the letters as a string or a list of strings."
        )
    letters = tuple(alphabet)
    for letter in letters:
        if not isinstance(letter, str) or not letter:
            raise UserError(f"DFA: letter {letter!r} is not a non-empty string.")
    for letter, times in Counter(letters).items():
        if times > 1:
            raise UserError(f"DFA: letter {letter!r} is in the alphabet {times} times.")
    return letters


def is_permutation(images: object) -> bool:
    """Whether these are the whole numbers 0, 1, ..., n - 1 in some order."""
    if not isinstance(images, Collection) or isinstance(images, Mapping) or getattr(images, "ndim", 1) != 1:
        return False
    return {whole_number(q) for q in images} == set(range(len(images)))
