"""The plan of a file: places, routes and models of its rows, and the order in which the rows are sent.

An upload parses each row once and makes the plan, which the database has as long as the file. The rows of a
batch are read by their offsets when they are sent. A result belongs to a line, independent of the plan.

Rows that share a prefix are sent together, so that an engine computes the prefix once, even if its KV cache
can't hold all prefixes of a batch. Prefixes and their least lengths are the same as in the choice of a
replica by prefix (`serve_app/ingress/replica_choice.py`). Several groups of rows are open at once: a group
mostly runs on one replica, and all replicas should be busy.
"""

import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from struct import Struct
from typing import IO, NamedTuple
from zlib import crc32

from serve_app.api.facts import ENDS, prefix_of
from serve_app.api.protocol import JSON
from serve_app.ingress.body import BOM
from serve_app.jobs.content import Contents
from serve_app.rows.rows import Row

SLICE_LINES = 128
SLICE_BYTES = 1 << 20


class InputLine(NamedTuple):
    """A line that isn't blank.

    Attributes:
        number: Its number in the file, from 1.
        text: Its text, without the space around it; None: it is longer than allowed.
        offset: The place of the text in the file, in bytes.
    """

    number: int
    text: bytes | None
    offset: int


BLANK_LINES = 100_000
"""Blank lines that are skipped. Further blank lines are wrong rows: 200 MB would take 47 s of a core."""


def read_lines(file: IO[bytes], max_line_bytes: int) -> Iterator[InputLine]:
    """Yield the lines that aren't blank, and blank lines after the first `BLANK_LINES`, in one reading.

    Args:
        file: The file.
        max_line_bytes: Bytes beyond which a line isn't kept.
    """
    number = offset = blank = 0
    while True:
        text, whole = _read_line(file, max_line_bytes)
        if not text:
            return
        number += 1
        size = len(text)
        if number == 1:
            text = text.removeprefix(BOM)
        text = text.lstrip()
        start = offset + size - len(text)
        text = text.rstrip()
        blank += whole and not text
        if text or not whole or blank > BLANK_LINES:
            yield InputLine(number, text if whole else None, start)
        offset = file.tell()


def _read_line(file: IO[bytes], most: int) -> tuple[bytes, bool]:
    """Return a line, empty at the end of the file, and whether the line is whole."""
    text = file.readline(most + 1)
    if len(text) <= most or text.endswith(b"\n"):
        return text, True
    while (rest := file.readline(most + 1)) and not rest.endswith(b"\n"):
        pass
    return text, False


SHARED = 0.25
"""Least share of the bytes of rows that their common prefix must have."""

TOGETHER = 4
"""Rows in flight for each open group, so that the prefix of the group stays in the KV cache."""

GAP_BYTES = 4096
"""Largest gap between two rows that are read together, in bytes."""


class Target(NamedTuple):
    """The route and the model that rows call.

    Attributes:
        url: The route; empty: a route that no batch may call.
        model: The model that the bodies name; None: they name no model.
    """

    url: str
    model: str | None


class PlanEntry(NamedTuple):
    """A row in the plan.

    Attributes:
        offset: Place of its text in the input, in bytes.
        size: Bytes of its text.
        line: Number of its line.
        target: Number of its target in `RowPlan.targets`.
        prefix: Hash of the longest prefix that it shares with other rows; 0: none.
        turn: Its place in the order of groups, from 0.
        check: CRC-32 of its text.
    """

    offset: int
    size: int
    line: int
    target: int
    prefix: int
    turn: int
    check: int


_ENTRY = Struct("<QIIIIII")


class RowPlan:
    """The rows of a file. An entry takes 32 bytes.

    Args:
        entries: The entries, in the order of the input.
        targets: The targets of the rows.
        errors: OpenAI's errors of lines that are wrong in every batch, in the order of the input. A plan with
            errors may lack rows.
    """

    def __init__(
        self, entries: bytes | bytearray, targets: Sequence[Target], errors: Sequence[JSON] = ()
    ) -> None:
        self.entries = entries
        self.targets = tuple(targets)
        self.errors = tuple(errors)

    def __len__(self) -> int:
        return len(self.entries) // _ENTRY.size

    def __getitem__(self, number: int) -> PlanEntry:
        """Return the entry of a row, by its number in the input, from 0; blank lines don't count."""
        return PlanEntry._make(_ENTRY.unpack_from(self.entries, _ENTRY.size * number))

    def __iter__(self) -> Iterator[PlanEntry]:
        return map(PlanEntry._make, _ENTRY.iter_unpack(self.entries))

    @classmethod
    def of_entries(
        cls, entries: Iterable[PlanEntry], targets: Sequence[Target], errors: Sequence[JSON] = ()
    ) -> "RowPlan":
        """Return the plan of these rows, which are in the order of the input."""
        return cls(b"".join(_ENTRY.pack(*entry) for entry in entries), targets, errors)

    @property
    def model(self) -> str | None:
        """The model of all rows that name a model; None: they name several models, or none."""
        models = {target.model for target in self.targets if target.model is not None}
        return models.pop() if len(models) == 1 else None


class _Group(NamedTuple):
    """Rows that are sent together.

    Attributes:
        prefix: The hash of their prefix; 0: a single row that shares no prefix.
        rows: Their numbers.
    """

    prefix: int
    rows: list[int]


class Planner:
    """Makes a plan from rows that are added in the order of the input.

    In memory, a row takes its entry, and 4 bytes for each hash of its prompt (`serve_app.api.facts.ENDS`).
    """

    def __init__(self) -> None:
        self._entries = bytearray()
        self._sizes = array("I")
        self._targets: dict[Target, int] = {}
        self._target_of = array("I")
        self._chains: list[bytes] = []

    def add(self, line: InputLine, body: JSON, target: Target) -> None:
        """Add a row.

        Args:
            line: The row's line, which isn't longer than allowed.
            body: The row's body, which may be invalid.
            target: The route and the model that the row calls.
        """
        text = line.text or b""
        number = self._targets.setdefault(target, len(self._targets))
        self._entries += _ENTRY.pack(line.offset, len(text), line.number, number, 0, 0, crc32(text))
        self._sizes.append(len(text))
        self._target_of.append(number)
        self._chains.append(array("I", prefix_of(body)).tobytes())

    def finish(self, errors: Sequence[JSON] = ()) -> RowPlan:
        """Return the plan.

        Args:
            errors: Errors of lines; see `RowPlan`.
        """
        by_target: dict[int, list[int]] = {}
        for row, target in enumerate(self._target_of):
            by_target.setdefault(target, []).append(row)
        # Models share no KV cache.
        bundles = list(chain.from_iterable(self._bundles(rows, 0) for rows in by_target.values()))
        bundles.sort(key=lambda bundle: min(min(group.rows) for group in bundle))
        prefixes, turns = array("I", self._target_of), array("I", self._target_of)
        turn = 0
        for group in chain.from_iterable(bundles):
            for row in group.rows:
                prefixes[row], turns[row] = group.prefix, turn
                turn += 1
        entries = map(_placed, RowPlan(self._entries, ()), prefixes, turns)
        return RowPlan.of_entries(entries, list(self._targets), errors)

    def _bundles(self, rows: list[int], depth: int) -> list[list[_Group]]:
        """Return rows in groups, and the groups in bundles that share a shorter prefix.

        Args:
            rows: Rows of one model that share their first hashes, in the order of the input.
            depth: Number of shared hashes.
        """
        while True:
            branches: dict[bytes, list[int]] = {}
            for row in rows:
                branches.setdefault(self._chains[row][4 * depth : 4 * depth + 4], []).append(row)
            if len(branches) > 1 or b"" in branches:
                break
            depth += 1
        bundles = []
        rest = branches.pop(b"", [])
        for branch in branches.values():
            if len(branch) > 1:
                bundles += self._bundles(branch, depth + 1)
            else:
                rest += branch
        if not depth or ENDS[depth - 1] * len(rows) < SHARED * sum(self._sizes[row] for row in rows):
            return bundles + [[_Group(0, [row])] for row in rest]
        if rest:
            prefix = int.from_bytes(self._chains[rest[0]][4 * depth - 4 : 4 * depth], sys.byteorder)
            bundles.append([_Group(prefix or 1, sorted(rest))])
        return [[*chain.from_iterable(bundles)]]


def _placed(entry: PlanEntry, prefix: int, turn: int) -> PlanEntry:
    return entry._replace(prefix=prefix, turn=turn)


class Turns:
    """Rows in the order in which they are sent: in turn from each group of rows that is open.

    Args:
        plan: The plan of the rows.
        rows: Numbers of rows; rows of a group are adjacent.
    """

    def __init__(self, plan: RowPlan, rows: "array[int]") -> None:
        self._plan = plan
        self._rows = rows
        self._left = len(rows)
        self._next = 0
        self._open: deque[range] = deque()

    def __len__(self) -> int:
        """Return the number of rows that are left."""
        return self._left

    def peek(self, groups: int, most: int) -> "tuple[list[int], Callable[[], None]]":
        """Return the numbers of the next rows, about a MiB at most, and a function that takes them.

        Args:
            groups: Groups that may be open at once.
            most: Most rows.
        """
        following, opened = self._next, self._open.copy()
        numbers: list[int] = []
        size = 0
        while len(numbers) < most and size < SLICE_BYTES:
            while len(opened) < groups and following < len(self._rows):
                group = self._group(following)
                following = group.stop
                opened.append(group)
            if not opened:
                break
            group = opened.popleft()
            numbers.append(self._rows[group[0]])
            size += self._plan[numbers[-1]].size
            if group := group[1:]:
                opened.append(group)

        def take() -> None:
            self._next, self._open = following, opened
            self._left -= len(numbers)

        return numbers, take

    def _group(self, start: int) -> range:
        """Return the places of the rows of the group that begins at a place in `rows`."""
        prefix = self._plan[self._rows[start]].prefix
        end = start + 1
        while prefix and end < len(self._rows) and self._plan[self._rows[end]].prefix == prefix:
            end += 1
        return range(start, end)


class Unsent:
    """The rows of a batch that had no result when this object was made; taken in slices.

    Args:
        plan: The plan of the input.
        file: The input.
        rows: Numbers of the rows; rows of a group are adjacent.
    """

    def __init__(self, plan: RowPlan, file: str, rows: "array[int]") -> None:
        self._plan = plan
        self._file = file
        self._turns = Turns(plan, rows)

    def __len__(self) -> int:
        return len(self._turns)

    def take(self, content: Contents, groups: int = 1, most: int = SLICE_LINES) -> list[Row]:
        """Return the next rows, in turn from each group that is open; about a MiB at most.

        A row that the input no longer has is left out: the batch ends without its result, and fails.

        Args:
            content: The contents.
            groups: Groups that may be open at once.
            most: Most rows.

        Raises:
            ContentLostError: The input is gone. No row was taken.
            OSError: The disk fails. No row was taken.
        """
        numbers, take = self._turns.peek(groups, most)
        entries = [self._plan[number] for number in numbers]
        texts = _read(content, self._file, entries)
        take()
        return [
            Row(entry.line, texts[entry.offset], self._plan.targets[entry.target].model)
            for entry in entries
            if crc32(texts[entry.offset]) == entry.check
        ]


def _read(content: Contents, file: str, entries: Sequence[PlanEntry]) -> dict[int, bytes]:
    """Return the texts of rows, by their offsets. Adjacent rows are read together."""
    spans: list[tuple[int, int]] = []
    for entry in sorted(entries):
        if spans and entry.offset - sum(spans[-1]) <= GAP_BYTES:
            start = spans[-1][0]
            spans[-1] = start, entry.offset + entry.size - start
        else:
            spans.append((entry.offset, entry.size))
    pieces = iter(zip(spans, content.spans(file, spans), strict=True))
    found: dict[int, bytes] = {}
    start = end = 0
    piece = b""
    for entry in sorted(entries):
        if entry.offset >= end:
            (start, size), piece = next(pieces)
            end = start + size
        found[entry.offset] = piece[entry.offset - start : entry.offset - start + entry.size]
    return found
