"""The ledger's files after any order of work, failures and kills: no call twice, at most a round lost."""

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.ledger import writer as writer_module
from serve_app.ledger.calls import Call, CallBook
from serve_app.ledger.disk import DRAFT, LocalDisk
from serve_app.ledger.parquet import to_parquet
from serve_app.ledger.report import LedgerFiles
from serve_app.ledger.rows import LedgerRow, decode, encode
from serve_app.ledger.writer import (
    JSONL,
    MAX_PENDING,
    ORPHANED_S,
    PARQUET,
    TOUCH_S,
    Ledger,
    Writer,
    new_book,
    segment_path,
    unique_name,
)
from serve_app.settings.schema import SettingsError
from serve_app.settings.usage import LedgerSettings, PriceSettings, UsageSettings
from serve_app.wire.usage import Tokens, Usage
from tests.fakes.clock import Clock
from tests.fakes.disk import KilledError
from tests.progress import STILL_S, wait_until
from tests.serve_app.ledger.crashing import (
    FOLDER,
    FakeSequence,
    MemoryDisk,
    Store,
    begun,
    book_of,
    call_of,
    ran,
)
from tests.serve_app.ledger.ledgers import START, row

DAY_S = 86_400.0
TODAY = "2027-01-15"
LINE = encode(row(1))

Sizes = dict[str, int]
"""Output tokens by call; each call has a tenant of its own."""


def rows_in(store: Store) -> list[LedgerRow]:
    """Return the rows of a ledger as a reader sees them."""
    found = []
    for path, data in sorted(store.files.items()):
        if path.suffix == PARQUET:
            found += decode(data.removeprefix(b"PAR1"))[0]
        elif path.suffix == JSONL and path.with_suffix(PARQUET) not in store.files:
            found += decode(data)[0]
    return found


def packed(content: bytes) -> bytes:
    return b"PAR1" + content


class Process:
    """An Engine replica as far as the ledger goes.

    Attributes:
        counted: Tokens of the calls that have ended.
        written: Tokens of the calls that had ended at the last round without a failure.
    """

    def __init__(
        self, store: Store, clock: Clock, name: str, *, parquet: bool = False, **options: Any
    ) -> None:
        self.name = name
        self.disk = MemoryDisk(store, clock)
        self.clock = clock
        self.book = book_of(name, clock)
        self.counted: Sizes = {}
        self.written: Sizes = {}
        self.ledger = Ledger(
            self.book,
            FOLDER,
            disk=self.disk,
            compact=packed if parquet else None,
            clock=clock,
            now=clock,
            **({"segment_bytes": 2_000} | options),
        )
        self._running: list[tuple[Call, Usage, FakeSequence]] = []
        self._calls = 0

    def begin(self) -> None:
        self._calls += 1
        call = call_of(self.book, f"{self.name}-{self._calls}")
        sequence = FakeSequence(Tokens(output=self._calls))
        self._running.append((call, begun(call, sequence), sequence))

    def end(self, which: int = 0) -> None:
        if self._running:
            call, slot, sequence = self._running.pop(which % len(self._running))
            slot.end()
            call.close()
            self.counted[call.request.scheduling.tenant] = sequence.now.output

    def run(self, calls: int = 1) -> None:
        """Begin and end some calls."""
        for _ in range(calls):
            self.begin()
            self.end()

    def turn(self, turn: "Turn") -> None:
        """Do what happens between two rounds, and the round."""
        for _ in range(turn.begins):
            self.begin()
        for which in turn.ends:
            self.end(which)
        # Clocks jump, back too.
        self.clock.now += turn.wait_s
        self.disk.failing, self.disk.share = turn.fails is not None, turn.fails or 0.0
        self.disk.full = self.disk.failing and turn.full
        self.ledger.round()
        if self.ledger.behind_s == 0:
            self.written = dict(self.counted)
        if turn.closes:
            try:
                self.ledger.close()
            except OSError:
                assert self.disk.full


class Turn(NamedTuple):
    """Events up to the end of a round.

    Attributes:
        begins: Calls that begin.
        ends: Calls that end, by their place among the running ones.
        wait_s: Seconds that pass.
        fails: Share that an append writes before it fails; None: it succeeds.
        full: Where it fails, files can't be replaced either.
        closes: Whether the closed segments are compacted after it.
    """

    begins: int
    ends: list[int]
    wait_s: float
    fails: float | None
    full: bool
    closes: bool


TURNS = st.lists(
    st.builds(
        Turn,
        begins=st.integers(0, 3),
        ends=st.lists(st.integers(0, 9), max_size=3),
        wait_s=st.sampled_from([0.5, 0.5, 6.0, DAY_S, -DAY_S]),
        fails=st.sampled_from([None, None, None, 0.0, 0.3, 0.7, 1.0]),
        full=st.booleans(),
        closes=st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def check(store: Store, *processes: Process) -> None:
    """Check that every row of a round that succeeded is there, and no call twice or with other tokens."""
    rows = rows_in(store)
    sizes = {row.tenant: row.output_tokens for row in rows}
    assert len(sizes) == len(rows)
    for process in processes:
        assert process.written.items() <= sizes.items()
    assert sizes.items() <= {key: value for one in processes for key, value in one.counted.items()}.items()


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
    store, clock = Store(), Clock(START)
    dying = Process(store, clock, "a", parquet=parquet)
    other = Process(store, clock, "b", parquet=parquet)
    other.turn(Turn(1, [0], 0.5, None, False, False))
    dying.disk.kill_at, dying.disk.kill_share = kill_at, share
    try:
        for turn in turns:
            dying.turn(turn)
            check(store, dying, other)
    except KilledError:
        pass
    check(store, dying, other)
    clock.now += 2 * ORPHANED_S
    for step in adopters:
        adopter = Process(store, clock, "c", parquet=parquet)
        adopter.disk.kill_at = step
        with suppress(KilledError):
            adopter.ledger.adopt()
        check(store, dying, other)
    last = Process(store, clock, "d", parquet=parquet)
    last.ledger.adopt()
    check(store, dying, other)


@given(turns=TURNS, parquet=st.booleans())
def test_a_process_that_ends_in_order_leaves_exact_sums(turns: list[Turn], parquet: bool) -> None:
    store = Store()
    process = Process(store, Clock(START), "a", parquet=parquet)
    for turn in turns:
        process.turn(turn)
    process.disk.failing = process.disk.full = False
    assert process.ledger.finish()
    process.ledger.close()
    assert {row.tenant: row.output_tokens for row in rows_in(store)} == process.counted
    assert process.ledger.dropped == 0


def test_a_row_has_the_origin_of_its_call_and_its_times() -> None:
    store, clock = Store(), Clock(START)
    process = Process(store, clock, "a")
    call = call_of(process.book, "acme", "r-1", clock)
    slot = call.usage.begin(Usage(clock.now - 0.25, clock.now, 0.0))
    slot.count(FakeSequence(Tokens(10, 4, 3)))
    clock.now += 2
    slot.end()
    call.close()
    process.ledger.round()
    (row,) = rows_in(store)
    assert (row.key, row.tenant, row.model, row.tier) == ("ada", "acme", "demo", "default")
    assert (row.endpoint, row.source, row.request_id) == ("/v1/completions", "http", "r-1")
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (10, 4, 3)
    assert (row.wait_s, row.engine_s, row.outcome) == (0.25, 2.0, "ok")
    assert row.time.timestamp() == clock.now
    assert (row.replica, row.resumed, row.adapter) == ("replica-a", False, "")


def test_rows_that_can_not_be_written_wait_and_the_oldest_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "MAX_PENDING", 2)
    store, clock = Store(), Clock(START)
    process = Process(store, clock, "a")
    process.disk.failing, process.disk.share = True, 0.6
    for _ in range(3):
        process.run()
        process.ledger.round()
    assert process.ledger.dropped == 1
    assert caplog.text.count("can't be written") == 1
    process.disk.failing = False
    process.ledger.round()
    assert [row.output_tokens for row in rows_in(store)] == [1, 2]
    assert MAX_PENDING > 1_000


def test_an_idle_process_writes_nothing() -> None:
    store, clock = Store(), Clock(START)
    process = Process(store, clock, "a")
    process.ledger.round()
    process.disk.kill_at = 0
    clock.now += 10
    process.ledger.round()
    assert (store.files, process.ledger.behind_s) == ({}, 0)


def test_rows_go_to_the_day_on_which_their_calls_ended() -> None:
    store, clock = Store(), Clock(START)
    process = Process(store, clock, "a")
    process.run()
    clock.now += DAY_S
    process.run()
    process.ledger.round()
    assert sorted(store.files) == [segment_path(FOLDER, f"2027-01-{15 + n}", "a", n) for n in (0, 1)]


def test_a_process_tells_whether_its_last_rows_are_written() -> None:
    process = Process(Store(), Clock(START), "a")
    process.run()
    process.disk.failing = True
    assert not process.ledger.finish()
    process.disk.failing = False
    assert process.ledger.finish()


# Closed segments


def upload_to(uploaded: list[Path], failures: int = 0) -> Callable[[Path], None]:
    """Return an upload that fails so many times before it works."""
    left = iter([True] * failures)

    def upload(path: Path) -> None:
        if next(left, False):
            raise OSError("no such bucket")
        uploaded.append(path)

    return upload


def add(store: Store, number: int, *, day: str = TODAY, name: str = "a", content: bytes = LINE) -> Path:
    """Add a segment that was written long ago."""
    path = segment_path(FOLDER, day, name, number)
    store.files[path], store.times[path] = content, 0.0
    return path


def test_the_number_of_a_segment_is_that_of_its_first_row() -> None:
    store = Store()
    process = Process(store, Clock(START), "a", segment_bytes=1)
    for calls in (2, 1, 1):
        process.run(calls)
        process.ledger.round()
    assert sorted(store.files) == [segment_path(FOLDER, TODAY, "a", number) for number in (0, 2, 3)]


def test_closed_segments_of_this_process_are_compacted() -> None:
    store = Store()
    closed, other = add(store, 0), add(store, 0, name="b")
    process = Process(store, Clock(START), "a", parquet=True)
    process.run()
    process.ledger.round()
    process.ledger.close()
    grows = segment_path(FOLDER, TODAY, "a", 0)
    # The first segment of the process has the place of the old one here.
    assert {*store.files} == {grows, other}
    process.ledger.finish()
    process.ledger.close()
    assert {*store.files} == {closed.with_suffix(PARQUET), other}


def test_a_segment_that_can_not_be_compacted_is_tried_once_and_uploaded_as_it_is() -> None:
    store, tried, uploaded = Store(), [], list[Path]()
    path = add(store, 0, content=b"no row\n")

    def compact(content: bytes) -> bytes:
        tried.append(content)
        raise ValueError("it has no rows")

    ledger = Process(store, Clock(START), "a", upload=upload_to(uploaded, failures=1)).ledger
    ledger._compact = compact
    with pytest.raises(OSError, match="no such bucket"):
        ledger.close()
    assert {*store.files} == {path}
    ledger.close()
    assert (tried, uploaded, {*store.files}) == ([b"no row\n"], [path], set())


def test_an_upload_that_fails_goes_on_with_the_same_segment() -> None:
    store, uploaded = Store(), list[Path]()
    first, second = add(store, 0), add(store, 1)
    ledger = Process(store, Clock(START), "a", upload=upload_to(uploaded, failures=1)).ledger
    with pytest.raises(OSError, match="no such bucket"):
        ledger.close()
    ledger.close()
    assert (uploaded, store.files) == ([first, second], {})


def test_a_draft_of_a_crash_is_removed_and_never_uploaded() -> None:
    store, uploaded = Store(), list[Path]()
    path = add(store, 0)
    store.files[path.with_name(path.name + DRAFT)] = b"half of"
    Process(store, Clock(START), "a", upload=upload_to(uploaded)).ledger.close()
    assert (uploaded, store.files) == ([path], {})


def test_segments_of_old_days_are_removed() -> None:
    store = Store()
    add(store, 0, day="2027-01-11")
    add(store, 0, day="2027-01-10", name="b")
    young = add(store, 2, day="2027-01-12")
    ledger = Process(store, Clock(START), "a", keep_s=3 * DAY_S).ledger
    ledger.remove_old()
    assert {*store.files} == {young}


def test_while_too_many_bytes_wait_for_their_upload_rows_are_dropped() -> None:
    store = Store()
    add(store, 0, name="b")
    process = Process(store, Clock(START), "a", upload=upload_to([]), max_bytes=len(LINE) - 1)
    process.ledger.close()
    assert process.ledger.full
    process.run()
    process.ledger.round()
    assert process.ledger.dropped == 1
    store.files.clear()
    process.ledger.close()
    assert not process.ledger.full


# Processes that have died


def test_only_the_work_of_dead_processes_is_finished() -> None:
    store, clock, uploaded = Store(), Clock(START), list[Path]()
    dead, alive = Process(store, clock, "b"), Process(store, clock, "c")
    for process in (dead, alive):
        process.run(3)
        process.ledger.round()
    adopter = Process(store, clock, "a", upload=upload_to(uploaded))
    clock.now += ORPHANED_S - TOUCH_S
    alive.ledger.round()
    adopter.ledger.adopt()
    assert not uploaded
    clock.now += TOUCH_S
    adopter.ledger.adopt()
    assert uploaded == [segment_path(FOLDER, TODAY, "b", 0)]


def test_a_part_of_a_last_line_is_cut_off() -> None:
    store, clock = Store(), Clock(START)
    add(store, 0, name="b", content=LINE + LINE[:-9])
    adopter = Process(store, clock, "a", parquet=True)
    adopter.ledger.adopt()
    assert store.files[segment_path(FOLDER, TODAY, "b", 0).with_suffix(PARQUET)] == packed(LINE)


def test_work_of_a_dead_process_that_fails_is_left_to_the_next_call() -> None:
    store, uploaded = Store(), list[Path]()
    path = add(store, 0, name="b")
    adopter = Process(store, Clock(START), "a", upload=upload_to(uploaded, failures=1))
    with pytest.raises(OSError, match="no such bucket"):
        adopter.ledger.adopt()
    assert path in store.files
    adopter.ledger.adopt()
    assert uploaded == [path]


def test_a_process_that_stood_still_goes_on_in_another_segment() -> None:
    store, clock = Store(), Clock(START)
    process, adopter = (Process(store, clock, name, parquet=True) for name in "ab")
    process.run()
    process.ledger.round()
    clock.now += 2 * ORPHANED_S
    adopter.ledger.adopt()
    process.run()
    process.ledger.round()
    check(store, process)
    assert {row.tenant for row in rows_in(store)} == {"a-1", "a-2"}


# Threads and real files

FAST: dict[str, Any] = {"interval_s": 0.01, "closing_s": 0.01}
LIMIT_S = STILL_S


def settings(folder: str | Path, **fields: Any) -> UsageSettings:
    return UsageSettings(ledger=LedgerSettings(folder=str(folder), **fields))


def outputs(place: object) -> dict[str, int]:
    lines = LedgerFiles(str(place)).sums(["outcome"])
    return {line.values[0]: line.total.output_tokens for line in lines}


def test_rows_are_there_soon_and_a_writer_that_stops_leaves_parquet(tmp_path: Path) -> None:
    book = new_book("demo", "Engine:demo#1")
    writer = Writer(settings(tmp_path), book, **FAST).start()
    ran(book, Tokens(output=3))
    try:
        wait_until(lambda: outputs(tmp_path) == {"ok": 3})
    finally:
        writer.stop()
        writer.stop()
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".now"]
    assert path.name.startswith("Engine-demo-1-")
    assert path.suffix == PARQUET
    assert outputs(tmp_path) == {"ok": 3}
    assert writer.ledger.written == 1


def orphaned(folder: Path) -> None:
    """Let all segments of a folder be those of processes that have died."""
    for path in folder.rglob("*.jsonl"):
        os.utime(path, (0, 0))


def test_a_new_writer_finishes_the_work_of_a_dead_one(tmp_path: Path) -> None:
    dead = CallBook("demo", "old", "old-1")
    old = Writer(settings(tmp_path), dead)
    ran(dead, Tokens(output=3))
    old.flush()
    orphaned(tmp_path)
    writer = Writer(settings(tmp_path), new_book("demo", "new"), **FAST).start()
    try:
        wait_until(lambda: {path.suffix for path in tmp_path.glob("day=*/*")} == {PARQUET})
    finally:
        writer.stop()
    assert outputs(tmp_path) == {"ok": 3}


def test_a_ledger_at_a_url_is_uploaded_from_a_spool(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/far"
    options = settings(url, spool=str(tmp_path / "spool"), upload_s=0.01, format="jsonl")
    book = new_book("demo", "r")
    writer = Writer(options, book, **FAST).start()
    try:
        ran(book, Tokens(output=3))
        wait_until(lambda: (tmp_path / "far").exists() and outputs(url) == {"ok": 3})
        ran(book, Tokens(output=4))
    finally:
        writer.stop()
    assert outputs(url) == {"ok": 7}
    assert not list((tmp_path / "spool").rglob("*.jsonl"))


def test_a_service_takes_no_rows_from_the_spool_of_another_url(tmp_path: Path) -> None:
    def writer_to(bucket: str) -> tuple[CallBook, Writer, str]:
        url = f"local://{tmp_path}/{bucket}"
        options = settings(url, spool=str(tmp_path / "spool"), upload_s=0.01, format="jsonl")
        book = new_book("demo", "r")
        (tmp_path / bucket).mkdir(exist_ok=True)
        return book, Writer(options, book, **FAST), url

    book, dead, first = writer_to("first")
    ran(book, Tokens(output=3))
    dead.flush()
    orphaned(tmp_path)
    book, other, second = writer_to("second")
    ran(book, Tokens(output=4))
    other.start()
    try:
        wait_until(lambda: outputs(second))
    finally:
        other.stop()
    assert outputs(second) == {"ok": 4}
    _, following, _ = writer_to("first")
    following.start()
    try:
        wait_until(lambda: outputs(first) == {"ok": 3})
    finally:
        following.stop()


def test_the_prices_are_kept_beside_the_rows(tmp_path: Path) -> None:
    options = UsageSettings(
        ledger=LedgerSettings(folder=str(tmp_path)), prices={"demo": PriceSettings(input=1.0)}
    )
    writer = Writer(options, new_book("demo", "r"), **FAST).start()
    try:
        wait_until((tmp_path / "prices.json").exists)
    finally:
        writer.stop()
    assert json.loads((tmp_path / "prices.json").read_text())["prices"]["demo"]["input"] == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"folder": "nosuch://x"}, "usage.ledger.folder"), ({"folder": "s3://bucket/x"}, "s3fs")],
)
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fields: Any, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(SettingsError, match=message):
        Writer(UsageSettings(ledger=LedgerSettings(spool=str(tmp_path), **fields)), new_book("m", "r"))


class FullDisk(LocalDisk):
    """A disk that is full for what is replaced."""

    def replace(self, path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")


def test_files_of_old_days_are_removed_from_a_full_disk(tmp_path: Path) -> None:
    old = tmp_path / "day=2020-01-01" / "a.00000.parquet"
    old.parent.mkdir()
    old.write_bytes(b"")
    book = new_book("demo", "r")
    writer = Writer(settings(tmp_path, keep_days=30), book, disk=FullDisk(), **FAST)
    ran(book, Tokens(output=3))
    writer.ledger.finish()
    writer.start()
    try:
        wait_until(lambda: not old.exists())
    finally:
        writer.stop()
    # The closed segment can't become Parquet.
    assert outputs(tmp_path) == {"ok": 3}


class HangingDisk(LocalDisk):
    """A disk that hangs until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def append(self, path: Path, data: bytes) -> None:
        self.goes_on.wait(LIMIT_S)
        super().append(path, data)


def test_a_disk_that_hangs_does_not_hold_up_the_end_of_the_process(tmp_path: Path) -> None:
    book, disk = new_book("demo", "r"), HangingDisk()
    writer = Writer(settings(tmp_path), book, disk=disk, last_s=0.01)
    ran(book, Tokens(output=3))
    ends = [threading.Thread(target=writer.flush), threading.Thread(target=writer.stop, args=(0.01,))]
    try:
        for end in ends:
            end.start()
            end.join(LIMIT_S / 2)
            assert not end.is_alive()
    finally:
        disk.goes_on.set()
    wait_until(lambda: outputs(tmp_path) == {"ok": 3})


@pytest.mark.parametrize(
    ("replica", "name"),
    [("llm#Engine:demo#abc1", "llm-Engine-demo-abc1-"), ("a.b/c d", "a-b-c-d-"), ("#", "engine-")],
)
def test_the_name_of_a_process_is_that_of_a_file_and_of_no_other_process(replica: str, name: str) -> None:
    first, second = unique_name(replica), unique_name(replica)
    assert first.startswith(name)
    assert first != second


def test_parquet_has_the_rows_of_the_lines(tmp_path: Path) -> None:
    path = tmp_path / f"day={TODAY}" / "a.000000000.parquet"
    path.parent.mkdir()
    path.write_bytes(to_parquet(LINE))
    assert outputs(tmp_path) == {"ok": 0}
