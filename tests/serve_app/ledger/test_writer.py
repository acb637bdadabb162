"""The threads that write a ledger, on real files."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from serve_app.ledger.calls import CallBook
from serve_app.ledger.disk import LocalDisk
from serve_app.ledger.reading import read
from serve_app.ledger.remote import Remote
from serve_app.ledger.report import Report
from serve_app.ledger.writer import Writer, new_book, start_writer
from serve_app.relay.usage import Tokens
from serve_app.settings.schema import SettingsError
from serve_app.settings.usage import LedgerSettings, PriceSettings, UsageSettings
from tests.progress import STILL_S
from tests.serve_app.ledger.crashing import FakeSequence, begun, call_of, ran

FAST = {"interval_s": 0.01, "closing_s": 0.01}
LIMIT_S = STILL_S


def settings(folder: str | Path, **fields: Any) -> UsageSettings:
    return UsageSettings(ledger=LedgerSettings(folder=str(folder), **fields))


def outputs(folder: Path, files: Any = None) -> dict[str, int]:
    lines = read(files or LocalDisk(), folder, Report(["outcome"])).lines()
    return {line.values[0]: line.total.output_tokens for line in lines}


def wait_for(condition: Any) -> None:
    """Wait for what a thread does."""
    tick = threading.Event()
    for _ in range(int(LIMIT_S / 0.01)):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("it never came")


def test_rows_are_there_soon_and_running_calls_too(tmp_path: Path) -> None:
    book = new_book("demo", "Engine:demo#1")
    writer = Writer(settings(tmp_path), book, **FAST).start()
    ran(book, Tokens(output=3))
    call = call_of(book)
    slot = begun(call, FakeSequence(Tokens(output=4)))
    try:
        wait_for(lambda: outputs(tmp_path) == {"ok": 3, "running": 4})
        slot.end()
        call.close()
        wait_for(lambda: outputs(tmp_path) == {"ok": 7})
    finally:
        writer.stop()
    assert outputs(tmp_path) == {"ok": 7}
    assert writer.ledger.written == 2


def test_a_writer_that_stops_leaves_parquet_and_no_lock(tmp_path: Path) -> None:
    book = new_book("demo", "Engine:demo#1")
    writer = Writer(settings(tmp_path), book, **FAST).start()
    ran(book, Tokens(output=3))
    writer.stop()
    writer.stop()
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert path.name.startswith("Engine-demo-1-")
    assert path.suffix == ".parquet"
    assert outputs(tmp_path) == {"ok": 3}


def test_a_new_writer_finishes_the_work_of_a_dead_one(tmp_path: Path) -> None:
    dead = CallBook("demo", "old", "old-1")
    ran(dead, Tokens(output=1))
    old = Writer(settings(tmp_path), dead)
    ran(dead, Tokens(output=3))
    begun(call_of(dead), FakeSequence(Tokens(output=4)))
    old.flush()
    # The system gives its lock back.
    lock = tmp_path / "open" / "old-1.lock"
    old._disk._locks[lock].close()
    book = new_book("demo", "new")
    writer = Writer(settings(tmp_path), book, **FAST).start()
    try:
        wait_for(lambda: not lock.exists())
    finally:
        writer.stop()
    assert outputs(tmp_path) == {"ok": 3, "lost": 4}
    assert {path.suffix for path in tmp_path.glob("day=*/*")} == {".parquet"}


def test_a_ledger_at_a_url_is_uploaded_from_a_spool(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/far"
    options = settings(url, spool=str(tmp_path / "spool"), upload_s=0.01, format="jsonl")
    book = new_book("demo", "r")
    writer = Writer(options, book, **FAST).start()
    remote = Remote(url)
    try:
        ran(book, Tokens(output=3))
        wait_for(lambda: outputs(remote.root, remote) == {"ok": 3})
        ran(book, Tokens(output=4))
    finally:
        writer.stop()
    assert outputs(remote.root, remote) == {"ok": 7}
    assert not list((tmp_path / "spool").rglob("*.jsonl"))


def test_rows_that_can_not_be_uploaded_wait_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise OSError("no such bucket")

    url = f"local://{tmp_path}/far"
    options = settings(url, spool=str(tmp_path / "spool"), upload_s=0.01, max_spool_bytes=1)
    book = new_book("demo", "r")
    writer = Writer(options, book, **FAST)
    monkeypatch.setattr(writer._closer, "_upload", away)
    writer.start()
    try:
        ran(book, Tokens(output=3))
        wait_for(lambda: writer.ledger.segments.full)
        ran(book, Tokens(output=4))
        wait_for(lambda: writer.ledger.dropped == 1)
        monkeypatch.undo()
        wait_for(lambda: not writer.ledger.segments.full)
    finally:
        writer.stop()
    remote = Remote(url)
    assert outputs(remote.root, remote) == {"ok": 3}


def test_the_prices_are_kept_beside_the_rows(tmp_path: Path) -> None:
    options = UsageSettings(
        ledger=LedgerSettings(folder=str(tmp_path)), prices={"demo": PriceSettings(input=1.0)}
    )
    writer = Writer(options, new_book("demo", "r"), **FAST).start()
    try:
        wait_for((tmp_path / "prices.json").exists)
    finally:
        writer.stop()
    assert json.loads((tmp_path / "prices.json").read_text())["prices"]["demo"]["input"] == 1.0


def test_files_of_old_days_are_removed(tmp_path: Path) -> None:
    old = tmp_path / "day=2020-01-01" / "a.00000.parquet"
    old.parent.mkdir()
    old.write_bytes(b"")
    book = new_book("demo", "r")
    writer = Writer(settings(tmp_path, keep_days=30), book, **FAST).start()
    try:
        ran(book, Tokens(output=3))
        wait_for(lambda: not old.exists())
    finally:
        writer.stop()
    assert outputs(tmp_path) == {"ok": 3}


def test_a_service_without_a_ledger_has_no_writer() -> None:
    assert start_writer(UsageSettings(), new_book("demo", "r")) is None


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


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_files_of_old_days_are_removed_from_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "day=2020-01-01" / "a.00000.parquet"
    old.parent.mkdir()
    old.write_bytes(b"")
    book = new_book("demo", "r")
    closed = tmp_path / "day=2999-01-01" / f"{book.name}.00000.jsonl"
    closed.parent.mkdir()
    closed.write_bytes(b"")
    writer = Writer(settings(tmp_path, keep_days=30), book, **FAST)
    # The closed segment can't become Parquet.
    monkeypatch.setattr(writer._disk, "replace", full)
    writer.start()
    try:
        wait_for(lambda: not old.exists())
    finally:
        writer.stop()
    assert closed.exists()


def test_rows_that_a_full_disk_refuses_at_the_end_are_left_to_the_next_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = settings(f"local://{tmp_path}/far", spool=str(tmp_path / "spool"), format="jsonl")
    book = new_book("demo", "r")
    writer = Writer(options, book, **FAST)
    ran(book, Tokens(output=3))
    writer.flush()
    monkeypatch.setattr(writer._disk, "append", full)
    ran(book, Tokens(output=4))
    writer.flush()
    writer.stop()
    # The system gives its lock back.
    for lock in writer._disk._locks.values():
        lock.close()
    remote = Remote(f"local://{tmp_path}/far")
    following = Writer(options, new_book("demo", "r"), **FAST).start()
    try:
        wait_for(lambda: outputs(remote.root, remote) == {"ok": 7})
    finally:
        following.stop()


def test_a_service_takes_no_rows_from_the_spool_of_another_url(tmp_path: Path) -> None:
    def writer_to(bucket: str) -> tuple[CallBook, Writer, Remote]:
        url = f"local://{tmp_path}/{bucket}"
        options = settings(url, spool=str(tmp_path / "spool"), upload_s=0.01, format="jsonl")
        book = new_book("demo", "r")
        return book, Writer(options, book, **FAST), Remote(url)

    book, dead, first = writer_to("first")
    ran(book, Tokens(output=3))
    dead.flush()
    # The system gives its lock back.
    for lock in dead._disk._locks.values():
        lock.close()
    book, other, second = writer_to("second")
    ran(book, Tokens(output=4))
    other.start()
    try:
        wait_for(lambda: outputs(second.root, second))
    finally:
        other.stop()
    assert outputs(second.root, second) == {"ok": 4}
    _, following, _ = writer_to("first")
    following.start()
    try:
        wait_for(lambda: outputs(first.root, first) == {"ok": 3})
    finally:
        following.stop()


def test_a_disk_that_hangs_does_not_hold_up_the_end_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.ledger.writer.LAST_S", 0.01)
    book = new_book("demo", "r")
    writer = Writer(settings(tmp_path), book)
    goes_on = threading.Event()
    append = writer._disk.append

    def hang(path: Path, data: bytes) -> None:
        goes_on.wait(LIMIT_S)
        append(path, data)

    monkeypatch.setattr(writer._disk, "append", hang)
    ran(book, Tokens(output=3))
    ends = [threading.Thread(target=writer.flush), threading.Thread(target=writer.stop, args=(0.01,))]
    try:
        for end in ends:
            end.start()
            end.join(LIMIT_S / 2)
            assert not end.is_alive()
    finally:
        goes_on.set()
    wait_for(lambda: outputs(tmp_path) == {"ok": 3})
