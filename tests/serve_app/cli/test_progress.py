"""Progress on standard error."""

import pytest

from serve_app.cli.progress import Progress


def test_without_a_terminal_each_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    for stage in ("starting Ray", "starting Ray", "demo: starting"):
        progress.show(stage)
    progress.end("Ready")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("] ")[1] for line in lines] == ["starting Ray", "demo: starting", "Ready"]
    assert all(line.startswith("[  0 s] ") for line in lines)


def test_a_closed_terminal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def isatty(self) -> bool:
            return False

        def write(self, text: str) -> None:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("sys.stderr", Closed())
    Progress().end("Stopping")
