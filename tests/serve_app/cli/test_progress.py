"""Progress on standard error."""

from pathlib import Path

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


def test_the_end_of_a_log_is_shown_with_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "serve.log"
    log.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % i for i in range(100)))
    Progress().show_log(log, lines=3)
    assert capsys.readouterr().err == f"line 97\nline 98\nline 99\n\nthe whole log: {log}\n"


def test_a_closed_terminal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def isatty(self) -> bool:
            return False

        def write(self, text: str) -> None:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("sys.stderr", Closed())
    Progress().end("Stopping")
