"""Folders and files that other users must not enter."""

import os
import stat
from pathlib import Path

import pytest

from serve_app.system.private_files import close_session, close_to_others, new_private_file, private_folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_folder_is_made_or_closed(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    private_folder(folder)
    assert mode(folder) == 0o700
    folder.chmod(0o777)
    private_folder(folder)
    assert mode(folder) == 0o700


def test_a_folder_that_another_user_laid_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="belongs to another user, or is a link; remove it"):
        private_folder(tmp_path / "link")
    assert mode(tmp_path / "elsewhere") == 0o755


def test_a_new_file_is_private_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        new_private_file(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert mode(tmp_path / "file") == 0o600
    with pytest.raises(FileExistsError):
        new_private_file(tmp_path / "file", "other")
    assert (tmp_path / "file").read_text() == "text"


def test_the_owner_keeps_his_permissions(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o754)
    close_to_others(file)
    assert mode(file) == 0o700
    close_to_others(tmp_path / "missing")


def test_a_session_of_ray_is_closed_and_stays_in_its_place(tmp_path: Path) -> None:
    session = tmp_path / "ray" / "session"
    session.mkdir(parents=True)
    for folder in (session, session.parent):
        folder.chmod(0o777)
    close_session(session)
    assert (mode(session), mode(session.parent)) == (0o700, 0o1777)
    close_session(tmp_path / "missing" / "session")
