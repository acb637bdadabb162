"""The plan of a batch: where its rows are in the input, and the order in which they are sent.

A validation parses each row once and makes the plan, which is kept beside the input until the batch ends.
Rows are read by their places when they are sent. A plan that is missing is made again from the input: by its
line, a row has a result whatever the plan says, so the order of sending may change between two processes.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import msgspec
from pydantic_core import from_json

from serve_app.api.protocol import JSON
from serve_app.batches.content import Contents
from serve_app.batches.errors import ContentLostError
from serve_app.batches.lines import SLICE_BYTES, SLICE_LINES, Line, Position, read_slice
from serve_app.batches.rows import Row
from serve_app.batches.store import Store
from serve_app.batches.stored import Batch
from serve_app.batches.tokens import bound_of

GAP_BYTES = 4096
"""Bytes between two rows that are read with them, in place of a read of its own for each."""

ASKED_LINES = 10_000
"""Rows of which the store is asked at once whether they have a result."""

FORMAT = "plan-1"

LONGEST = sys.maxsize - 1


class Entry(NamedTuple):
    """A row in the plan.

    Attributes:
        offset: Place of its text in the input, in bytes.
        size: Bytes of its text.
        line: Number of its line.
        model: Number of its model in `Plan.models`.
        work: Bound of its work; see `tokens.bound_of`.
        turn: Its place in the order of sending, from 0.
        check: CRC-32 of its text.
    """

    offset: int
    size: int
    line: int
    model: int
    work: float
    turn: int
    check: int


_ENTRY = Struct("<QIIIfII")


class _Head(msgspec.Struct):
    """The beginning of a stored plan, a line of its own."""

    format: str
    rows: int
    models: list[str]
    check: int


_HEAD = msgspec.json.Decoder(_Head)


class Plan:
    """The rows of a batch. An entry takes 32 bytes.

    Args:
        entries: The entries, in the order of the input.
        models: The models that rows name; empty: a row names none.
    """

    def __init__(self, entries: bytes, models: Sequence[str]) -> None:
        self.models = tuple(models)
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries) // _ENTRY.size

    def __getitem__(self, number: int) -> Entry:
        """Return the entry of a row, by its number in the input, from 0; blank lines don't count."""
        return Entry._make(_ENTRY.unpack_from(self._entries, _ENTRY.size * number))

    def __iter__(self) -> Iterator[Entry]:
        return map(Entry._make, _ENTRY.iter_unpack(self._entries))

    def to_bytes(self) -> bytes:
        """Return the plan as it is stored."""
        head = _Head(FORMAT, len(self), list(self.models), crc32(self._entries))
        return msgspec.json.encode(head) + b"\n" + self._entries

    @classmethod
    def of_bytes(cls, text: bytes) -> "Plan | None":
        """Return a stored plan; None: it is damaged, or of another version."""
        head_text, _, entries = text.partition(b"\n")
        try:
            head = _HEAD.decode(head_text)
        except msgspec.MsgspecError:
            return None
        whole = len(entries) == _ENTRY.size * head.rows and crc32(entries) == head.check
        return cls(entries, head.models) if whole and head.format == FORMAT else None

    def keep(self, content: Contents, batch: str) -> None:
        """Store the plan of a batch, durably.

        Raises:
            OSError: The disk is full, or fails.
        """
        draft = content.draft()
        try:
            draft.write(self.to_bytes())
            content.keep(draft, plan_id(batch))
        finally:
            draft.discard()


def plan_id(batch: str) -> str:
    """Return the id of the content that has the plan of a batch. No file has it."""
    return f"plan-{batch}"


class Planner:
    """Makes a plan of rows that come one after the other, in the order of the input."""

    def __init__(self) -> None:
        self._entries = bytearray()
        self._rows = 0
        self._models: dict[str, int] = {}

    def add(self, line: Line, body: JSON, work: float) -> None:
        """Add a row.

        Args:
            line: Its line, which isn't longer than allowed.
            body: Its body, which may be wrong.
            work: Bound of its work; see `tokens.bound_of`.
        """
        text = line.text or b""
        model = body.get("model")
        number = self._models.setdefault(model if isinstance(model, str) else "", len(self._models))
        self._entries += _ENTRY.pack(
            line.offset, len(text), line.number, number, work, self._rows, crc32(text)
        )
        self._rows += 1

    def finish(self) -> Plan:
        """Return the plan."""
        return Plan(bytes(self._entries), list(self._models))


def plan_of(content: Contents, batch: Batch) -> Plan:
    """Return the stored plan of a batch; one that is missing or damaged is made again, and stored.

    Raises:
        ContentLostError: The input is gone.
        OSError: The disk is full, or fails.
    """
    id = plan_id(batch.id)
    if (size := content.size(id)) is not None:
        try:
            if plan := Plan.of_bytes(b"".join(content.pieces(id, size))):
                return plan
        except ContentLostError:
            pass
    planner = Planner()
    position, ended = Position(), False
    while not ended:
        lines, position, ended = read_slice(content.path(batch.input_file), position, LONGEST)
        for line in lines:
            text = line.text or b""
            try:
                body = from_json(text)["body"]
                planner.add(line, body, bound_of(batch.endpoint, body, len(text)))
            except (ValueError, TypeError, KeyError, AttributeError):
                # It was valid when it was validated.
                raise ContentLostError(f"the content of {batch.input_file} is not what it was") from None
    plan = planner.finish()
    plan.keep(content, batch.id)
    return plan


class Unsent:
    """The rows of a batch without a result, as they were when this was made; taken in slices.

    Args:
        plan: The plan of the batch.
        file: The input.
        rows: Numbers of the rows, in the order in which they are taken.
    """

    def __init__(self, plan: Plan, file: str, rows: "array[int]") -> None:
        self._plan = plan
        self._file = file
        self._rows = rows
        self._next = 0

    def __len__(self) -> int:
        return len(self._rows) - self._next

    def take(self, content: Contents, most: int = SLICE_LINES) -> list[Row]:
        """Return the next rows, about a MiB at most. If it raises, it has taken none.

        A row that the input doesn't have any more is left out: the batch ends without its result, and fails.

        Args:
            content: The contents.
            most: Most rows.

        Raises:
            ContentLostError: The input is gone.
            OSError: The disk fails.
        """
        entries: list[Entry] = []
        size = 0
        for number in self._rows[self._next : self._next + most]:
            entries.append(entry := self._plan[number])
            if (size := size + entry.size) >= SLICE_BYTES:
                break
        texts = _read(content, self._file, entries)
        self._next += len(entries)
        return [
            Row(entry.line, texts[entry.offset], self._plan.models[entry.model] or None)
            for entry in entries
            if crc32(texts[entry.offset]) == entry.check
        ]


def unsent(store: Store, content: Contents, batch: Batch, *, by_line: bool = False) -> Unsent:
    """Return the rows of a batch that have no result, in the order of its plan.

    Args:
        store: The state.
        content: The contents.
        batch: The batch.
        by_line: The order of the input instead.

    Raises:
        ContentLostError: The input is gone.
        OSError: The disk is full, or fails.
        DatabaseError: The same for the database.
    """
    plan = plan_of(content, batch)
    left = bytearray(len(plan))
    turns = array("I", bytes(4 * len(plan)))
    for start in range(0, len(plan), ASKED_LINES):
        numbers = range(start, min(len(plan), start + ASKED_LINES))
        finished = store.finished(batch.id, plan[numbers[0]].line, plan[numbers[-1]].line)
        for number in numbers:
            entry = plan[number]
            left[number] = entry.line not in finished
            turns[entry.turn] = number
    rows: Iterable[int] = range(len(plan)) if by_line else turns
    return Unsent(plan, batch.input_file, array("I", (number for number in rows if left[number])))


def _read(content: Contents, file: str, entries: Sequence[Entry]) -> dict[int, bytes]:
    """Return the texts of rows, by their offsets. Those beside each other are read as one."""
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
