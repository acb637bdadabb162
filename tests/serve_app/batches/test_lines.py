from pathlib import Path

import pytest

from serve_app.batches.errors import ContentLostError
from serve_app.batches.lines import Line, Position, read_slice


def test_slices_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\xef\xbb\xbfone\n\n  \r\ntwo\r\nthree")
    lines, place, ended = read_slice(path, Position(), 100, most_lines=1)
    assert (lines, ended) == ([Line(1, b"one", 3)], False)
    lines, place, ended = read_slice(path, place, 100, most_lines=1)
    assert (lines, ended) == ([Line(4, b"two", 12)], False)
    lines, place, ended = read_slice(path, place, 100)
    assert (lines, place.lines, ended) == ([Line(5, b"three", 17)], 5, True)


def test_a_long_line_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x" * 35 + b"\n" + b"y" * 10 + b"\n" + b"z" * 11)
    lines, _, ended = read_slice(path, Position(), 10)
    assert (lines, ended) == ([Line(1, None, 0), Line(2, b"y" * 10, 36), Line(3, None, 47)], True)


def test_a_long_line_that_begins_with_spaces_is_one(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b" " * 20 + b"{}\n{}\n")
    assert read_slice(path, Position(), 10)[0] == [Line(1, None, 11), Line(2, b"{}", 23)]


def test_a_slice_is_bounded_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes((b"x" * 9 + b"\n") * 100)
    lines, place, _ = read_slice(path, Position(), 100, most_bytes=25)
    assert (len(lines), place) == (3, Position(30, 3))


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(ContentLostError):
        read_slice(tmp_path / "in", Position(), 100)
