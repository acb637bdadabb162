"""Tables as plain text."""

from collections.abc import Collection, Sequence


def text_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (), rule: bool = False
) -> list[str]:
    """Return the lines of a table; a column without content in any row is left out.

    Args:
        heads: Heads of the columns.
        rows: Cells of the rows, one for each column.
        left: Columns that are aligned to the left; the others are aligned to the right.
        rule: Whether a line is drawn below the heads.
    """
    kept = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    widths = {place: max(len(row[place]) for row in (heads, *rows)) for place in kept}

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            f"{cells[place]:{'<' if place in left else '>'}{widths[place]}}" for place in kept
        ).rstrip()

    ruled = ["  ".join("─" * widths[place] for place in kept)] if rule else []
    return [line(heads), *ruled, *map(line, rows)]


def duration(seconds: float, error: float | None = None) -> str:
    """Return a short time in words, such as "0.7 ms", "123 ms" or "4.56 s", with its error if it is given."""
    unit, factor = ("s", 1.0) if seconds >= 1 else ("ms", 1e3)
    digits = 2 if seconds >= 1 else 1 if seconds < 0.1 else 0
    more = "" if error is None else f"±{error * factor:.{digits}f}"
    return f"{seconds * factor:.{digits}f}{more} {unit}"
