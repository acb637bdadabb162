"""Progress on standard error, without a terminal and on one."""

import io
import sys

import pytest

from serve_app.system.progress import Progress


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_without_a_terminal_each_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(clock=lambda: 0.0)
    for stage in ("starting Ray", "starting Ray", "demo: starting"):
        progress.show(stage)
    progress.end("Ready")
    assert lines(capsys) == ["[  0 s] starting Ray", "[  0 s] demo: starting", "[  0 s] Ready"]


def test_lines_are_periodic_and_a_note_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter((0.0, 1.0, 2.0, 11.0, 11.0, 12.0, 13.0))
    progress = Progress(timed=False, every_s=10.0, clock=lambda: next(times))
    for _ in range(4):
        progress.show("half", 1, 2, "trying again: gone")
    progress.show("all", 2, 2, last=True)
    progress.end()
    assert lines(capsys) == ["trying again: gone", "half", "all"]


def test_nothing_is_shown_if_nothing_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(quiet=True)
    progress.show("half", 1, 2, "note")
    progress.say("a line")
    progress.end("the end")
    assert lines(capsys) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_line_goes_and_what_is_said_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress(timed=False)
    progress.show("7 rows/s", 3, 4, "one is late")
    progress.say("uploading")
    progress.end("done")
    written = terminal.getvalue()
    assert "75%" in written
    assert "one is late" in written
    # The end of the line that changes, and what follows it.
    assert written.endswith("done\n")
    assert "7 rows/s" not in written.rpartition("\x1b[2K")[2]


@pytest.mark.parametrize("live", [False, True])
def test_a_closed_terminal_is_no_error(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    class Closed:
        encoding = "utf-8"

        def isatty(self) -> bool:
            return live

        def write(self, text: str) -> None:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("sys.stderr", Closed())
    progress = Progress()
    progress.show("starting")
    progress.end("Stopping")
