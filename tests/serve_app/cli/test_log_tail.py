"""Request lines that the launcher prints from the logs of the Ingress replicas."""

from pathlib import Path

from serve_app.cli.log_tail import RequestLines


def test_lines_are_shown_once_and_whole_whatever_the_name_of_their_file(tmp_path: Path) -> None:
    shown: list[str] = []
    lines = RequestLines(shown.append, tmp_path / "logs")
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


def test_what_is_left_is_shown_at_the_end(tmp_path: Path) -> None:
    shown: list[str] = []
    lines = RequestLines(shown.append, tmp_path)
    lines.start()
    (tmp_path / "requests_a.log").write_text("one\n")
    lines.stop()
    assert shown == ["one\n"]


def test_who_was_never_begun_shows_nothing(tmp_path: Path) -> None:
    shown: list[str] = []
    (tmp_path / "requests_a.log").write_text("of an earlier service\n")
    RequestLines(shown.append, tmp_path).stop()
    assert shown == []
