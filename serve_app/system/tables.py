"""Tables by rich, on a terminal and in plain text, and times in words."""

import io
import sys
from collections.abc import Collection, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

GAP = 2
"""Spaces between two columns."""

UNCUT = 100_000
"""A width at which no line of a table is cut."""

Cell = str | Text


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    left: Collection[int] = (),
    rule: bool = False,
    last: Sequence[Cell] = (),
    ranks: Mapping[int, int] | None = None,
    width: int = UNCUT,
) -> Table:
    """Return a table; a column without content in any row is left out.

    Args:
        heads: Heads of the columns.
        rows: Cells of the rows, one for each column.
        left: Columns that are aligned to the left; the others are aligned to the right.
        rule: Whether a line is drawn below the heads, and above the last row.
        last: The last row, such as a sum; empty: none.
        ranks: By column, the order in which a table wider than `width` leaves columns out, the highest first;
            a column without a rank stays.
        width: Columns of the terminal.
    """
    lines = [*rows, last] if last else rows
    widths = {
        place: max(cell_len(str(line[place])) for line in (heads, *lines))
        for place in range(len(heads))
        if not rows or any(len(row[place]) for row in rows)
    }
    while sum(widths.values()) + GAP * (len(widths) - 1) > width:
        ranked = {place: rank for place, rank in (ranks or {}).items() if place in widths}
        if not ranked:
            break
        del widths[max(ranked, key=ranked.__getitem__)]
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for place in widths:
        side = "left" if place in left else "right"
        made.add_column(Text(heads[place]), justify=side, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]

    def add(line: Sequence[Cell]) -> None:
        # A text with brackets is no markup.
        made.add_row(*(Text(cell) if isinstance(cell := line[place], str) else cell for place in widths))

    def draw() -> None:
        if rule:
            made.add_row(*(Rule(style="dim") for _ in widths))

    draw()
    for row in rows:
        add(row)
    if last:
        draw()
        add(last)
    return made


def text_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (),
    rule: bool = False,
    last: Sequence[str] = (),
    width: int = UNCUT,
) -> list[str]:
    """Return the lines of a table as plain text; the arguments are the arguments of `table`."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table(heads, rows, left=left, rule=rule, last=last))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def output_width() -> int:
    """Return the columns of standard output: a file or a pipe cuts no line."""
    return Console().width if sys.stdout.isatty() else UNCUT


def duration(seconds: float, error: float | None = None) -> str:
    """Return a short time in words, such as "0.7 ms", "123 ms" or "4.56 s", with its error if it is given."""
    unit, factor = ("s", 1.0) if seconds >= 1 else ("ms", 1e3)
    digits = 2 if seconds >= 1 else 1 if seconds < 0.1 else 0
    more = "" if error is None else f"±{error * factor:.{digits}f}"
    return f"{seconds * factor:.{digits}f}{more} {unit}"
