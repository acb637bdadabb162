"""The files of engines: what they say to each other, and what a kill leaves of them."""

import fcntl
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from msgspec.structs import replace

from serve_app.settings.turns import ShareSettings
from serve_app.turns.board import Board
from serve_app.turns.rota import Entry, Order, State, follow
from tests.progress import ANSWER_S


def said(board: Board, state: State = "asleep", devices: tuple[str, ...] = ("gpu",)) -> dict[str, Entry]:
    """Write an entry, and return the entries of the other engines."""
    found: dict[str, Entry] = {}

    def decide(name: str, others: Mapping[str, Entry]) -> Order:
        found.update(others)
        return Order(Entry("g", devices, state, 1.0))

    assert board.look(decide) is not None
    return found


def test_engines_see_the_last_entry_of_each_other(tmp_path: Path) -> None:
    first, second = Board(tmp_path), Board(tmp_path)
    assert said(first, devices=("a", "long", "list")) == {}
    said(first, "awake")
    assert said(second) == {first.file.name: Entry("g", ("gpu",), "awake", 1.0)}
    # Other users of the machine see nothing.
    assert {path.stat().st_mode & 0o077 for path in (tmp_path, first.file)} == {0}
    # The kernel frees the lock of a process that ends.
    first.close()
    assert said(second) == {}
    assert list(tmp_path.iterdir()) == [second.file]
    second.close()


def test_an_engine_that_looks_while_another_engine_looks_comes_again(tmp_path: Path) -> None:
    first, second = Board(tmp_path), Board(tmp_path)

    def decide(name: str, others: Mapping[str, Entry]) -> Order:
        assert second.look(decide) is None
        return Order(Entry("g", ("gpu",), "asleep", 1.0))

    assert first.look(decide) is not None
    assert len(said(second)) == 1
    first.close()
    second.close()


def test_an_entry_stays_as_it_was_if_it_can_not_be_written(tmp_path: Path) -> None:
    first, second = Board(tmp_path), Board(tmp_path)
    said(first, "awake")

    def decide(name: str, others: Mapping[str, Entry]) -> Order:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        first.look(decide)
    assert [entry.state for entry in said(second).values()] == ["awake"]
    first.file.unlink()
    # A new file would have no lock.
    with pytest.raises(FileNotFoundError):
        said(first)
    first.close()
    second.close()


ENGINE = """\
import os, subprocess, sys
from pathlib import Path
from serve_app.turns.board import LOCKED, Board
from tests.serve_app.turns.test_board import said

board = Board(Path(sys.argv[1]))
said(board, "awake")
os.environ[LOCKED] = str(board.file)
code = "from serve_app.turns.board import lock_inherited as l; l(); print('child', flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""
"""An engine: a process and its child, which both have the lock."""


def test_a_killed_engine_keeps_its_devices_until_its_last_process_ends(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        words = [engine.stdout.readline().strip() for _ in range(2)]
        child = next(int(word) for word in words if word != "child")
        board = Board(tmp_path)
        assert [entry.state for entry in said(board).values()] == ["awake"]
        # Its child is stopped, as a process that gives back much memory.
        os.kill(child, signal.SIGSTOP)
        engine.kill()
        engine.wait(ANSWER_S)
        assert [entry.state for entry in said(board).values()] == ["awake"]
        os.kill(child, signal.SIGKILL)
        # The pipe ends with the last process.
        engine.stdout.read()
        assert said(board) == {}
        board.close()


SHARE = ShareSettings(min_turn_s=0.001, max_wait_s=0.05)


def decide(now: float, own: Entry, name: str, others: Mapping[str, Entry]) -> Order:
    return follow(now, name, own, others, SHARE)


def take_turns(folder: Path, device: Path, report: Path, seed: int) -> None:
    """Take turns for ever as an engine with work does, and report each turn, or a device that is not free."""
    draw = random.Random(seed)
    board = Board(folder)
    own = Entry("g", ("gpu",), "starting", time.monotonic(), since=time.monotonic())
    memory = -1
    while True:
        now = time.monotonic()
        own = replace(own, at=now, busy=True)
        order = board.look(partial(decide, now, own))
        time.sleep(draw.random() * 0.002)
        if order is None:
            continue
        before, own = own.state, order.entry
        if own.state in {"loading", "waking"} and before != own.state:
            try:
                memory = os.open(device, os.O_RDONLY)
                fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report.write_text("beside another engine")
                return
            own = replace(own, state="awake", began=now, since=None)
            with report.open("a") as file:
                file.write(f"{now}\n")
        elif own.state == "draining":
            os.close(memory)
            own = replace(own, state="asleep", freed=time.monotonic(), since=now)


def test_no_two_engines_have_a_device_however_they_are_killed(tmp_path: Path) -> None:
    (device := tmp_path / "device").touch()
    context, draw = multiprocessing.get_context("fork"), random.Random(7)
    engines: dict[Path, BaseProcess] = {}

    def start(number: int) -> None:
        report = tmp_path / f"report-{number}"
        arguments = (tmp_path / "files", device, report, number)
        engines[report] = process = context.Process(target=take_turns, args=arguments, daemon=True)
        process.start()

    def turns() -> list[int]:
        found = {path: path.read_text() if path.exists() else "" for path in engines}
        assert "beside another engine" not in found.values()
        assert all(process.is_alive() for process in engines.values())
        return [len(text.splitlines()) for text in found.values()]

    for number in range(3, 33):
        while len(engines) < 3:
            start(number + len(engines) * 100)
        time.sleep(draw.random() * 0.02)
        turns()
        victim = draw.choice(list(engines))
        engines[victim].kill()
        engines.pop(victim).join()
    start(0)
    # The engines that are left go on.
    before, ends = turns(), time.monotonic() + ANSWER_S
    while any(now < then + 3 for now, then in zip(turns(), before, strict=True)):
        assert time.monotonic() < ends
        time.sleep(0.01)
    for process in engines.values():
        process.kill()
        process.join()
    board = Board(tmp_path / "files")
    assert said(board) == {}
    board.close()
