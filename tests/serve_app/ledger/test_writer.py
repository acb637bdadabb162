"""The ledger's files after any order of work, failures and kills: no call twice, at most a round lost."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

import fsspec
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.ledger.calls import Call, CallBook
from serve_app.ledger.parquet import to_parquet
from serve_app.ledger.prices import prices_of
from serve_app.ledger.report import LedgerFiles
from serve_app.ledger.rows import LedgerRow, encode
from serve_app.ledger.writer import Disk, Ledger, Writer, new_book
from serve_app.settings.schema import SettingsError
from serve_app.settings.usage import LedgerSettings, PriceSettings, UsageSettings
from serve_app.wire.usage import Tokens, Usage
from tests.fakes.clock import Clock
from tests.fakes.disk import KilledError
from tests.progress import STILL_S, wait_until
from tests.serve_app.ledger.crashing import DyingDisk, FakeSequence, begun, book_of, call_of, ran
from tests.serve_app.ledger.ledgers import START, row

DAY_S = 86_400.0
TODAY = "2027-01-15"
LINE = encode(row(1))

Sizes = dict[str, int]
"""Output tokens by call; each call has a tenant of its own."""


def files_in(folder: Path) -> set[Path]:
    """Return the segments of a ledger, in both forms."""
    return {path for path in folder.glob("day=*/*") if path.suffix in (".jsonl", ".parquet")}


def segment(folder: Path, day: str, name: str, number: int) -> Path:
    """Return the path of a segment of a process."""
    return folder / f"day={day}" / f"{name}.{number:06}.jsonl"


def rows_in(folder: Path) -> list[LedgerRow]:
    """Return the rows of a ledger as a reader sees them."""
    found = []
    for path in sorted(files_in(folder)):
        if path.suffix == ".parquet" or not path.with_suffix(".parquet").exists():
            data = path.read_bytes().removeprefix(b"PAR1")
            whole = data[: data.rfind(b"\n") + 1].splitlines()
            found += [msgspec.json.decode(line, type=LedgerRow) for line in whole]
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
        self, folder: Path, clock: Clock, name: str, *, parquet: bool = False, **options: Any
    ) -> None:
        self.name = name
        self.disk = DyingDisk()
        self.clock = clock
        self.book = book_of(name, clock)
        self.counted: Sizes = {}
        self.written: Sizes = {}
        self.ledger = Ledger(
            self.book,
            folder,
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
        if self.ledger.written == len(self.counted):
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


def check(folder: Path, *processes: Process) -> None:
    """Check that every row of a round that succeeded is there, and no call twice or with other tokens."""
    rows = rows_in(folder)
    sizes = {row.tenant: row.output_tokens for row in rows}
    assert len(sizes) == len(rows)
    for process in processes:
        assert process.written.items() <= sizes.items()
    assert sizes.items() <= {key: value for one in processes for key, value in one.counted.items()}.items()


@given(
    turns=TURNS,
    kill_at=st.integers(0, 24),
    share=st.floats(0, 1),
    starts=st.lists(st.integers(0, 6), max_size=4),
    parquet=st.booleans(),
)
def test_a_kill_at_any_step_loses_what_came_after_the_last_round_and_doubles_nothing(
    turns: list[Turn], kill_at: int, share: float, starts: list[int], parquet: bool
) -> None:
    clock = Clock(START)
    with TemporaryDirectory() as name:
        folder = Path(name)
        dying = Process(folder, clock, "a", parquet=parquet)
        other = Process(folder, clock, "b", parquet=parquet)
        other.turn(Turn(1, [0], 0.5, None, False, False))
        (held,) = files_in(folder)
        dying.disk.kill_at, dying.disk.kill_share = kill_at, share
        with suppress(KilledError):
            for turn in turns:
                dying.turn(turn)
                check(folder, dying, other)
        dying.disk.killed()
        check(folder, dying, other)
        for number, step in enumerate(starts):
            starting = Process(folder, clock, f"c{number}", parquet=parquet)
            starting.disk.kill_at = step
            with suppress(KilledError):
                starting.ledger.close()
            check(folder, dying, other)
        Process(folder, clock, "d", parquet=parquet).ledger.close()
        check(folder, dying, other)
        if parquet:
            assert {path for path in files_in(folder) if path.suffix == ".jsonl"} == {held}
        other.turn(Turn(1, [0], 0.5, None, False, False))
        check(folder, dying, other)
        other.disk.killed()


@given(turns=TURNS, parquet=st.booleans())
def test_a_process_that_ends_in_order_leaves_exact_sums(turns: list[Turn], parquet: bool) -> None:
    with TemporaryDirectory() as name:
        process = Process(Path(name), Clock(START), "a", parquet=parquet)
        for turn in turns:
            process.turn(turn)
        process.disk.failing = process.disk.full = False
        assert process.ledger.finish()
        process.ledger.close()
        assert {row.tenant: row.output_tokens for row in rows_in(Path(name))} == process.counted
        assert process.ledger.dropped == 0
        assert not parquet or all(path.suffix == ".parquet" for path in files_in(Path(name)))


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """A process whose ledger is in `tmp_path`."""
    made = Process(tmp_path, Clock(START), "a")
    yield made
    made.disk.killed()


def test_a_row_has_the_origin_of_its_call_and_its_times(process: Process, tmp_path: Path) -> None:
    clock = process.clock
    call = call_of(process.book, "acme", "r-1", clock)
    slot = call.usage.begin(Usage(clock.now - 0.25, clock.now, 0.0))
    slot.count(FakeSequence(Tokens(10, 4, 3)))
    clock.now += 2
    slot.end()
    call.close()
    process.ledger.round()
    (row,) = rows_in(tmp_path)
    assert (row.key, row.tenant, row.model, row.tier) == ("ada", "acme", "demo", "default")
    assert (row.endpoint, row.source, row.request_id) == ("/v1/completions", "http", "r-1")
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (10, 4, 3)
    assert (row.wait_s, row.engine_s, row.outcome) == (0.25, 2.0, "ok")
    assert row.time.timestamp() == clock.now
    assert (row.replica, row.resumed, row.adapter) == ("replica-a", False, "")


def test_rows_that_can_not_be_written_wait_and_the_oldest_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(tmp_path, Clock(START), "a", max_pending=2)
    process.disk.failing, process.disk.share = True, 0.6
    for _ in range(3):
        process.run()
        process.ledger.round()
    assert process.ledger.dropped == 1
    assert caplog.text.count("can't be written") == 1
    process.disk.failing = False
    process.ledger.round()
    assert [row.output_tokens for row in rows_in(tmp_path)] == [1, 2]


def test_an_idle_process_writes_nothing(process: Process, tmp_path: Path) -> None:
    process.ledger.round()
    process.disk.kill_at = 0
    process.clock.now += 10
    process.ledger.round()
    assert (list(tmp_path.iterdir()), process.ledger.behind_s) == ([], 0)


def test_rows_go_to_the_day_on_which_their_calls_ended(process: Process, tmp_path: Path) -> None:
    process.run()
    # A time is rounded to the millisecond, here to midnight.
    process.clock.now += 16 * 3600 - 0.0004
    process.run()
    process.ledger.round()
    assert files_in(tmp_path) == {segment(tmp_path, f"2027-01-{15 + n}", "a", n) for n in (0, 1)}


def test_a_process_tells_whether_its_last_rows_are_written(process: Process) -> None:
    process.run()
    process.disk.failing = True
    assert not process.ledger.finish()
    process.disk.failing = False
    assert process.ledger.finish()


# Closed segments


class Bucket:
    """Gets uploads, of which the first ones fail.

    Attributes:
        got: Contents by path.
        failures: Uploads that fail from now on.
    """

    def __init__(self, failures: int = 0) -> None:
        self.got: dict[Path, bytes] = {}
        self.failures = failures

    def __call__(self, path: Path, content: bytes) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError("no such bucket")
        self.got[path] = content


def add(folder: Path, number: int, *, day: str = TODAY, name: str = "b", content: bytes = LINE) -> Path:
    """Add a segment of another process, which nobody holds; return its path in the folder."""
    path = segment(folder, day, name, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path.relative_to(folder)


def test_a_closed_segment_is_compacted_and_a_growing_one_is_not(tmp_path: Path) -> None:
    process = Process(tmp_path, Clock(START), "a", parquet=True, segment_bytes=1)
    process.run(2)
    process.ledger.round()
    process.ledger._segment_bytes = 1_000_000
    process.run()
    process.ledger.round()
    process.ledger.close()
    first, second = (segment(tmp_path, TODAY, "a", number) for number in (0, 1))
    assert files_in(tmp_path) == {first.with_suffix(".parquet"), second}
    process.ledger.finish()
    process.ledger.close()
    assert files_in(tmp_path) == {path.with_suffix(".parquet") for path in (first, second)}


def test_a_segment_that_can_not_be_compacted_is_uploaded_as_it_is(tmp_path: Path) -> None:
    path, bucket = add(tmp_path, 0, content=b"no row\n"), Bucket()

    def compact(content: bytes) -> bytes:
        raise ValueError("it has no rows")

    ledger = Process(tmp_path, Clock(START), "a", upload=bucket).ledger
    ledger._compact = compact
    ledger.close()
    assert (bucket.got, files_in(tmp_path)) == ({path: b"no row\n"}, set())


def test_a_segment_that_can_not_be_compacted_stays_and_is_tried_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = add(tmp_path, 0, content=b"no row\n")
    writer = Process(tmp_path, Clock(START), "a", parquet=True).ledger
    writer._compact = to_parquet
    writer.close()
    writer.close()
    assert files_in(tmp_path) == {tmp_path / path}
    assert caplog.text.count("can't be written as Parquet") == 1


def test_an_upload_that_fails_holds_up_no_other_segment(tmp_path: Path) -> None:
    first, second, bucket = add(tmp_path, 0), add(tmp_path, 1), Bucket(failures=1)
    ledger = Process(tmp_path, Clock(START), "a", upload=bucket).ledger
    with pytest.raises(OSError, match="no such bucket"):
        ledger.close()
    ledger.close()
    assert list(bucket.got) == [second, first]
    assert not files_in(tmp_path)


def test_segments_of_old_days_are_removed(tmp_path: Path) -> None:
    add(tmp_path, 0, day="2027-01-11")
    add(tmp_path, 0, day="2027-01-10")
    young = add(tmp_path, 2, day="2027-01-12")
    Process(tmp_path, Clock(START), "a", keep_s=3 * DAY_S).ledger.remove_old()
    assert files_in(tmp_path) == {tmp_path / young}


def test_while_too_many_bytes_wait_for_their_upload_rows_are_dropped(tmp_path: Path) -> None:
    bucket = Bucket(failures=1)
    process = Process(tmp_path, Clock(START), "a", upload=bucket, max_bytes=len(LINE) - 1)
    add(tmp_path, 0)
    with suppress(OSError):
        process.ledger.close()
    assert process.ledger.full
    process.run()
    process.ledger.round()
    assert process.ledger.dropped == 1
    process.ledger.close()
    process.ledger.close()
    assert not process.ledger.full


# Segments of other processes


def test_a_start_finishes_only_what_nobody_holds(tmp_path: Path) -> None:
    clock, bucket = Clock(START), Bucket()
    dead, alive = Process(tmp_path, clock, "b"), Process(tmp_path, clock, "c")
    for process in (dead, alive):
        process.run(3)
        process.ledger.round()
    dead.disk.killed()
    starting = Process(tmp_path, clock, "a", upload=bucket)
    starting.ledger.close()
    assert [path.name for path in bucket.got] == ["b.000000.jsonl"]
    alive.disk.killed()
    starting.ledger.close()
    assert [path.name for path in bucket.got] == ["b.000000.jsonl", "c.000000.jsonl"]


def test_a_part_of_a_last_row_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = add(tmp_path, 0, content=LINE + LINE[:-9])
    Process(tmp_path, Clock(START), "a", parquet=True).ledger.close()
    assert (tmp_path / path).with_suffix(".parquet").read_bytes() == packed(LINE)
    assert "ends in a part of a row" in caplog.text


def test_a_new_file_that_a_start_has_taken_gets_no_rows(tmp_path: Path) -> None:
    process = Process(tmp_path, Clock(START), "a")
    taken = tmp_path / add(tmp_path, 0, name="a", content=b"")
    process.run()
    with taken.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.ledger.round()
        taken.unlink()
    process.ledger.round()
    check(tmp_path, process)
    assert files_in(tmp_path) == {segment(tmp_path, TODAY, "a", 1)}


KILLED = """
import sys, time
from pathlib import Path
from serve_app.ledger.writer import Writer
from serve_app.settings.usage import LedgerSettings, UsageSettings
from serve_app.wire.usage import Tokens
from tests.serve_app.ledger.crashing import ran
from serve_app.ledger.writer import new_book

book = new_book("demo", "old")
writer = Writer(UsageSettings(ledger=LedgerSettings(folder=sys.argv[1])), book)
ran(book, Tokens(output=3))
writer.flush()
print("written", flush=True)
time.sleep(600)
"""


def test_a_new_writer_finishes_the_work_of_a_killed_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as old:
        assert old.stdout is not None
        assert old.stdout.readline() == "written\n"
        first, second = (Writer(settings(tmp_path), new_book("demo", "new")).ledger for _ in range(2))
        first.close()
        assert {path.suffix for path in files_in(tmp_path)} == {".jsonl"}
        os.kill(old.pid, signal.SIGKILL)
        old.wait()
    second.close()
    assert {path.suffix for path in files_in(tmp_path)} == {".parquet"}
    assert outputs(tmp_path) == {"ok": 3}


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
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert path.name.startswith("Engine-demo-1-")
    assert path.suffix == ".parquet"
    assert outputs(tmp_path) == {"ok": 3}
    assert writer.ledger.written == 1


def there(url: str) -> bool:
    system, path = fsspec.url_to_fs(url)
    return bool(system.exists(path))


@pytest.mark.parametrize("scheme", ["local", "memory"])
def test_a_ledger_at_a_url_is_uploaded_from_a_spool(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}://{tmp_path}/far"
    options = settings(url, spool=str(tmp_path / "spool"), upload_s=0.01, format="jsonl")
    book = new_book("demo", "r")
    writer = Writer(options, book, **FAST).start()
    try:
        ran(book, Tokens(output=3))
        wait_until(lambda: there(url) and outputs(url) == {"ok": 3})
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
    dead.ledger.finish()
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
        ledger=LedgerSettings(folder=str(tmp_path)), prices={"demo": PriceSettings(input=1.0)}, currency="EUR"
    )
    writer = Writer(options, new_book("demo", "r"), **FAST).start()
    try:
        wait_until((tmp_path / "prices.json").exists)
    finally:
        writer.stop()
    assert LedgerFiles(str(tmp_path)).prices == prices_of(options)


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


class FullDisk(Disk):
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


class HangingDisk(Disk):
    """A disk that hangs until it is let go."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def append(self, file: IO[bytes], data: bytes) -> None:
        self.goes_on.wait(LIMIT_S)
        super().append(file, data)


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
    first, second = (new_book("demo", replica).name for _ in range(2))
    assert first.startswith(name)
    assert first != second


def test_parquet_has_the_rows_of_the_lines(tmp_path: Path) -> None:
    path = tmp_path / f"day={TODAY}" / "a.000000000.parquet"
    path.parent.mkdir()
    path.write_bytes(to_parquet(LINE))
    assert outputs(tmp_path) == {"ok": 0}
