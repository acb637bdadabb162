"""Lines that the launcher prints from log files that grow."""

from pathlib import Path

from serve_app.cli.log_tail import LogLines


def test_lines_are_shown_once_and_whole_also_after_a_rotation(tmp_path: Path) -> None:
    shown: list[str] = []
    lines = LogLines(shown.append, tmp_path / "logs")
    lines.look()
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "requests_a.log"
    log.write_text("one\ntw")
    (tmp_path / "logs" / "replica_a.log").write_text("not this\n")
    lines.look()
    lines.look()
    assert shown == ["one\n"]
    log.write_text("one\ntwo\n")
    log.rename(tmp_path / "logs" / "requests_a.log.1")
    log.write_text("three\n")
    lines.look()
    assert sorted(shown) == ["one\n", "three\n", "two\n"]


def test_the_last_lines_are_shown_at_the_end(tmp_path: Path) -> None:
    shown: list[str] = []
    lines = LogLines(shown.append, tmp_path)
    lines.start()
    (tmp_path / "requests_a.log").write_text("one\n")
    lines.stop()
    assert shown == ["one\n"]


def test_a_file_of_an_earlier_service_is_shown_from_its_end_on(tmp_path: Path) -> None:
    shown: list[str] = []
    log = tmp_path / "requests_a.log"
    log.write_text("earlier\n")
    lines = LogLines(shown.append, tmp_path, since=log.stat().st_mtime + 1)
    lines.look()
    with log.open("a") as file:
        file.write("now\n")
    lines.look()
    assert shown == ["now\n"]


def test_nothing_is_shown_without_a_start(tmp_path: Path) -> None:
    shown: list[str] = []
    (tmp_path / "requests_a.log").write_text("of an earlier service\n")
    LogLines(shown.append, tmp_path).stop()
    assert shown == []
