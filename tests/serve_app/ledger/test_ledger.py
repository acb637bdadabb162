"""The ledger's files after any order of work, failures and kills: no call twice, at most a round lost."""

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.ledger.calls import Call
from serve_app.ledger.closing import Closer
from serve_app.ledger.files import JSONL, OPEN, lock_path, open_path
from serve_app.ledger.ledger import MAX_PENDING, Ledger
from serve_app.ledger.parquet import to_parquet
from serve_app.ledger.reading import read
from serve_app.ledger.report import Report
from serve_app.ledger.rows import decode
from serve_app.relay.usage import Tokens, Usage
from tests.serve_app.ledger.crashing import (
    FOLDER,
    Clock,
    FakeSequence,
    KilledError,
    MemoryDisk,
    Store,
    begun,
    book_of,
    call_of,
    ran,
)

DAY_S = 86_400.0

Sizes = dict[str, int]
"""Output tokens by call; each call has a tenant of its own."""


class Process:
    """An Engine replica as far as the ledger goes."""

    def __init__(self, store: Store, clock: Clock, name: str, *, parquet: bool) -> None:
        self.name = name
        self.disk = MemoryDisk(store)
        self.clock = clock
        self.book = book_of(name, clock)
        self.ledger = Ledger(self.book, FOLDER, disk=self.disk, clock=clock, now=clock, segment_bytes=2_000)
        self.closer = Closer(
            FOLDER,
            name,
            self.disk,
            growing=lambda: self.ledger.segments.growing,
            compact=to_parquet if parquet else None,
            clock=clock,
        )
        self.running: list[tuple[Call, Usage, FakeSequence]] = []
        self.counted: Sizes = {}
        self.safe: Sizes = {}
        self._calls = 0

    def begin(self) -> None:
        self._calls += 1
        call = call_of(self.book, f"{self.name}-{self._calls}")
        sequence = FakeSequence()
        self.running.append((call, begun(call, sequence), sequence))

    def grow(self, which: int) -> None:
        if self.running:
            call, _, sequence = self.running[which % len(self.running)]
            sequence.now = sequence.now.plus(Tokens(output=1))
            self.counted[call.origin.tenant] = sequence.now.output

    def end(self, which: int) -> None:
        if self.running:
            call, slot, _ = self.running.pop(which % len(self.running))
            slot.end()
            call.close()

    def round(self) -> None:
        self.ledger.round()
        if not self.disk.full:
            self.safe = dict(self.counted)

    def turn(self, turn: "Turn") -> None:
        """Do what happens between two rounds, and the round."""
        for _ in range(turn.begins):
            self.begin()
        for which in turn.grows:
            self.grow(which)
        for which in turn.ends:
            self.end(which)
        # Clocks jump, back too.
        self.clock.now += turn.wait_s
        self.disk.failing, self.disk.share = turn.fails is not None, turn.fails or 0.0
        self.disk.full = self.disk.failing and turn.full
        if turn.closes == "meanwhile":
            self.disk.meanwhile = self.close
        self.round()
        # A round that replaced nothing has not called it, and one close never runs inside another.
        self.disk.meanwhile = lambda: None
        if turn.closes == "then":
            self.close()

    def close(self) -> None:
        try:
            self.closer.close_segments()
        except OSError:
            assert self.disk.full


def found(store: Store) -> Sizes:
    """Return the output tokens of each call as a reader sees them, none of them twice."""
    lines = read(MemoryDisk(store), FOLDER, Report(["tenant"])).lines()
    assert {line.total.calls for line in lines} <= {1}
    return {line.values[0]: line.total.output_tokens for line in lines if line.total.output_tokens}


def check(store: Store, *processes: Process) -> None:
    """Check that nothing of the last whole round is missing, and nothing is there that was not counted."""
    sizes = found(store)
    for process in processes:
        for call, most in process.counted.items():
            assert process.safe.get(call, 0) <= sizes.pop(call, 0) <= most, call
    assert sizes == {}


class Turn(NamedTuple):
    """Events up to the end of a round.

    Attributes:
        begins: Calls that begin.
        grows: Calls that get a token, by their place among the running ones.
        ends: Calls that end.
        wait_s: Seconds that pass.
        fails: Share that an append writes before it fails; None: it succeeds.
        full: Where it fails, files can't be replaced either.
        closes: When the closed segments are compacted: in the round, after it, or not.
    """

    begins: int
    grows: list[int]
    ends: list[int]
    wait_s: float
    fails: float | None
    full: bool
    closes: str


TURNS = st.lists(
    st.builds(
        Turn,
        begins=st.integers(0, 3),
        grows=st.lists(st.integers(0, 9), max_size=6),
        ends=st.lists(st.integers(0, 9), max_size=3),
        wait_s=st.sampled_from([0.5, 0.5, 0.5, DAY_S, -DAY_S]),
        fails=st.sampled_from([None, None, None, 0.0, 0.3, 0.7, 1.0]),
        full=st.booleans(),
        closes=st.sampled_from(["", "then", "meanwhile"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    turns=TURNS,
    kill_at=st.integers(0, 24),
    share=st.floats(0, 1),
    adopters=st.lists(st.integers(0, 6), max_size=4),
    parquet=st.booleans(),
)
def test_a_kill_at_any_write_loses_what_came_after_the_last_round_and_doubles_nothing(
    turns: list[Turn], kill_at: int, share: float, adopters: list[int], parquet: bool
) -> None:
    store, clock = Store(), Clock()
    dying = Process(store, clock, "a", parquet=parquet)
    other = Process(store, clock, "b", parquet=parquet)
    other.turn(Turn(1, [0], [], 0.5, None, False, ""))
    dying.disk.kill_at, dying.disk.kill_share = kill_at, share
    try:
        for turn in turns:
            dying.turn(turn)
            check(store, dying, other)
    except KilledError:
        pass
    dying.disk.die()
    check(store, dying, other)
    for step in adopters:
        adopter = Process(store, clock, "c", parquet=parquet)
        adopter.disk.kill_at = step
        try:
            adopter.closer.adopt()
        except KilledError:
            adopter.disk.die()
        check(store, dying, other)
    other.closer.adopt()
    check(store, dying, other)
    assert not [path for path in store.files if path.parent.name == OPEN and path.name.startswith("a.")]
    torn = [path for path, data in store.files.items() if path.suffix == JSONL and data[-1:] not in b"\n"]
    assert {path.name.partition(".")[0] for path in torn} <= {"b"}


@settings(max_examples=100, deadline=None)
@given(turns=TURNS, parquet=st.booleans())
def test_a_process_that_ends_in_order_leaves_exact_sums(turns: list[Turn], parquet: bool) -> None:
    store = Store()
    process = Process(store, Clock(), "a", parquet=parquet)
    for turn in turns:
        process.turn(turn)
    process.disk.failing = process.disk.full = False
    process.ledger.finish()
    process.close()
    process.closer.release()
    assert found(store) == process.counted
    assert process.ledger.dropped == 0
    assert not [path for path in store.files if path.parent.name == OPEN]


def rows_in(store: Store) -> list[Any]:
    return [
        row
        for path, data in sorted(store.files.items())
        if path.parent.name.startswith("day=")
        for row in decode(data)[0]
    ]


def test_a_row_has_the_origin_of_its_call_and_its_times() -> None:
    store, clock = Store(), Clock()
    process = Process(store, clock, "a", parquet=False)
    call = call_of(process.book, "acme", "r-1", clock)
    slot = call.usage.begin(Usage(clock.now - 0.25, clock.now, 0.0))
    slot.count(FakeSequence(Tokens(10, 4, 3)))
    clock.now += 2
    slot.end()
    call.close()
    process.round()
    (row,) = rows_in(store)
    assert (row.key, row.tenant, row.model, row.tier) == ("ada", "acme", "demo", "default")
    assert (row.endpoint, row.source, row.request_id) == ("/v1/completions", "http", "r-1")
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (10, 4, 3)
    assert (row.wait_s, row.engine_s, row.outcome) == (0.25, 2.0, "ok")
    assert row.time.timestamp() == clock.now
    assert (row.replica, row.resumed, row.adapter) == ("replica-a", False, "")


def test_a_call_that_gave_the_engine_nothing_leaves_no_row() -> None:
    store, clock = Store(), Clock()
    process = Process(store, clock, "a", parquet=False)
    call_of(process.book).close("failed")
    call = call_of(process.book)
    call.usage.begin().end("failed")
    call.close()
    process.round()
    assert rows_in(store) == []


def test_rows_that_can_not_be_written_wait_and_the_oldest_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("serve_app.ledger.ledger.MAX_PENDING", 2)
    store, clock = Store(), Clock()
    process = Process(store, clock, "a", parquet=False)
    process.disk.failing, process.disk.full, process.disk.share = True, True, 0.6
    for output in (1, 2, 3):
        ran(process.book, Tokens(output=output))
        process.round()
    assert process.ledger.dropped == 1
    assert caplog.text.count("can't be written") == 1
    process.disk.failing = process.disk.full = False
    process.round()
    assert [row.output_tokens for row in rows_in(store)] == [1, 2]
    assert MAX_PENDING > 1_000


def test_an_idle_process_writes_nothing() -> None:
    store, clock = Store(), Clock()
    process = Process(store, clock, "a", parquet=False)
    process.round()
    process.disk.kill_at = 0
    clock.now += 10
    process.round()
    assert process.ledger.behind_s == 0


def test_the_calls_that_run_at_the_end_of_a_process_are_lost_with_it() -> None:
    store, clock = Store(), Clock()
    process = Process(store, clock, "a", parquet=False)
    process.begin()
    process.grow(0)
    process.ledger.finish()
    assert [(row.outcome, row.output_tokens) for row in rows_in(store)] == [("lost", 1)]


def test_a_running_call_is_lost_once_its_process_is_gone() -> None:
    store, clock = Store(), Clock()
    process = Process(store, clock, "a", parquet=False)
    process.begin()
    process.grow(0)
    process.round()

    def outcomes() -> list[tuple[str, ...]]:
        return [line.values for line in read(MemoryDisk(store), FOLDER, Report(["outcome"])).lines()]

    assert outcomes() == [("running",)]
    process.disk.die()
    assert outcomes() == [("lost",)]
    Process(store, clock, "b", parquet=True).closer.adopt()
    assert outcomes() == [("lost",)]
    assert open_path(FOLDER, "a") not in store.files


def test_rows_go_to_the_day_on_which_their_calls_ended() -> None:
    store, clock = Store(), Clock()
    process = Process(store, clock, "a", parquet=False)
    ran(process.book, Tokens(output=1))
    clock.now += DAY_S
    ran(process.book, Tokens(output=2))
    process.round()
    assert [path.parent.name for path in sorted(store.files) if "day=" in str(path)] == [
        "day=2027-01-15",
        "day=2027-01-16",
    ]
    lines = read(MemoryDisk(store), FOLDER, Report(["day"])).lines()
    assert [(line.values[0], line.total.output_tokens) for line in lines] == [
        ("2027-01-15", 1),
        ("2027-01-16", 2),
    ]


def test_a_call_ends_with_the_last_of_its_slots() -> None:
    store, clock = Store(), Clock()
    process = Process(store, clock, "a", parquet=False)
    call = call_of(process.book)
    sequence = FakeSequence()
    first, second = begun(call, FakeSequence(Tokens(output=1))), begun(call, sequence)
    first.end()
    call.close("cancelled")
    process.round()
    assert rows_in(store) == []
    # Its client has left, and the engine goes on for a moment.
    sequence.now = Tokens(output=7)
    second.end("cancelled")
    process.round()
    assert [(row.output_tokens, row.outcome) for row in rows_in(store)] == [(8, "cancelled")]


def test_a_call_that_ends_during_a_round_is_in_its_state() -> None:
    store, clock = Store(), Clock()
    process = Process(store, clock, "a", parquet=False)
    process.begin()
    process.grow(0)

    def ending() -> float:
        process.end(0)
        return clock.now

    # The clock is read between the look at the calls and the writing.
    Ledger(process.book, FOLDER, disk=process.disk, clock=ending, now=clock).round()
    process.disk.die()
    check(store, process)
    assert found(store) == {"a-1": 1}


def test_the_sums_of_too_many_tenants_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.ledger.calls.MAX_TENANTS", 2)
    process = Process(Store(), Clock(), "a", parquet=False)
    for tenant in ("a", "b", "c", "d"):
        ran(process.book, Tokens(output=1), tenant)
    assert {name: sums.output for name, sums in process.book.by_tenant().items()} == {
        "a": 1,
        "b": 1,
        "other": 2,
    }


def test_a_process_whose_lock_another_one_has_writes_nothing_before_it_is_free() -> None:
    store, clock = Store(), Clock()
    process, other = (Process(store, clock, name, parquet=True) for name in "ab")
    # It looks for the work of processes that have died, and sees the file before this process has its lock.
    lock = lock_path(FOLDER, "a")
    assert other.disk.lock(lock)
    ran(process.book, Tokens(output=3))
    process.round()
    assert rows_in(store) == []
    other.disk.unlock(lock)
    process.round()
    ran(process.book, Tokens(output=4))
    process.round()
    other.closer.adopt()
    assert [row.output_tokens for row in rows_in(store)] == [3, 4]


def test_a_process_tells_whether_its_last_rows_are_written() -> None:
    store, clock = Store(), Clock()
    process = Process(store, clock, "a", parquet=False)
    ran(process.book, Tokens(output=3))
    process.disk.failing = True
    assert not process.ledger.finish()
    process.disk.failing = False
    assert process.ledger.finish()
