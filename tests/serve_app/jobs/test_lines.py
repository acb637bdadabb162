from pathlib import Path

import pytest

from serve_app.jobs.errors import ContentLostError
from serve_app.jobs.plan import Line, read_lines


def lines(folder: Path, text: bytes, most: int = 100) -> list[Line]:
    path = folder / "in"
    path.write_bytes(text)
    return [*read_lines(path, most)]


def test_lines_have_their_numbers_and_places(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbfone\n\n  \r\ntwo\r\n  three"
    found = lines(tmp_path, text)
    assert found == [Line(1, b"one", 3), Line(4, b"two", 12), Line(5, b"three", 19)]
    assert all(text[line.offset :].startswith(line.text or b"?") for line in found)


def test_a_long_line_is_not_kept(tmp_path: Path) -> None:
    found = lines(tmp_path, b"x" * 35 + b"\n" + b"y" * 10 + b"\n" + b"z" * 11, 10)
    assert found == [Line(1, None, 0), Line(2, b"y" * 10, 36), Line(3, None, 47)]


def test_a_long_line_that_begins_with_spaces_is_one(tmp_path: Path) -> None:
    found = lines(tmp_path, b" " * 20 + b"{}\n{}\n", 10)
    assert [(line.number, line.text) for line in found] == [(1, None), (2, b"{}")]


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(ContentLostError):
        next(read_lines(tmp_path / "in", 100))
