"""Files of settings that are read again."""

import errno
from pathlib import Path

import pytest

from serve_app.settings.schema import SettingsError
from serve_app.settings.watched_file import WatchedFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def test_a_change_is_seen_once(path: Path) -> None:
    file = WatchedFile(str(path), "access.keys_file")
    assert not file.look()
    path.write_text("a")
    assert (file.look(), file.look(), file.read()) == (True, False, "a")
    other = path.with_name("new.yaml")
    other.write_text("b")
    other.replace(path)
    assert (file.look(), file.look(), file.read()) == (True, False, "b")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE])
def test_a_file_that_could_not_be_opened_has_changed_once_it_can(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path.write_text("a")
    file = WatchedFile(str(path), "access.keys_file")

    def refuse(*_: object, **__: object) -> object:
        raise OSError(number, "no")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        # A change of its permissions alone leaves its content, size and time as they were.
        assert (file.look(), file.look()) == (True, False)
    assert file.look()


def test_a_file_that_was_seen_and_could_not_be_read_has_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("a")
    file = WatchedFile(str(path), "access.keys_file")

    def fail(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        with pytest.raises(SettingsError, match=r"access\.keys_file \(.*keys\.yaml\): Too many open files"):
            file.read()
    assert (file.look(), file.read(), file.look()) == (True, "a", False)


def test_a_file_that_could_not_be_used_has_changed(path: Path) -> None:
    path.write_text("a")
    file = WatchedFile(str(path), "access.keys_file")
    file.unread()
    assert (file.look(), file.look()) == (True, False)
    path.unlink()
    assert file.look()
    file.unread()
    assert file.look()


def test_the_origin_of_a_file_that_is_no_text_is_told(path: Path) -> None:
    path.write_bytes(b"\xff")
    with pytest.raises(SettingsError, match=r"access\.keys_file .*: it is not UTF-8"):
        WatchedFile(str(path), "access.keys_file").read()
