"""Tables as aligned text."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Cells in columns as wide as their longest cell; the first `left` columns are flush left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
