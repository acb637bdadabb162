"""The journal after a crash at any byte: no written row is lost, none is there twice."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_app.driver.chunks import Item
from serve_app.driver.errors import OutputError
from serve_app.driver.journal import Journal

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def row(number: int) -> dict[str, Any]:
    detail = {"finish_reason": "stop", "prompt_tokens": 2, "completion_tokens": 1}
    return Item(number, f"ä{number}", "").done("x\n" * (number % 3), detail, 1)


def chunked(numbers: list[int], size: int) -> list[list[dict[str, Any]]]:
    return [[row(n) for n in numbers[at : at + size]] for at in range(0, len(numbers), size)]


def written(path: Path) -> list[int]:
    return [json.loads(line)["row"] for line in path.read_bytes().splitlines()]


@SHARED
@given(st.permutations(range(8)), st.integers(1, 4), st.data())
def test_it_goes_on_wherever_it_was_cut_off(
    tmp_path: Path, order: list[int], size: int, data: st.DataObject
) -> None:
    path = tmp_path / "out.jsonl"
    path.unlink(missing_ok=True)
    journal = Journal(path)
    chunks = [rows for at in order for rows in chunked(list(range(at * size, (at + 1) * size)), size)]
    for rows in chunks:
        journal.append(rows)
    journal.close()
    whole = path.read_bytes()

    cut = data.draw(st.integers(0, len(whole)), label="bytes that survive")
    path.write_bytes(whole[:cut])
    journal = Journal(path)
    survivors = whole[:cut].count(b"\n")
    assert len(journal.done) == survivors == len(written(path))
    assert journal.torn == (not whole[:cut].endswith(b"\n") and cut > 0)
    assert journal.totals.rows == survivors
    for rows in chunks:
        journal.append([one for one in rows if one["row"] not in journal.done])
    journal.put_in_order()
    journal.close()

    assert written(path) == list(range(8 * size))
    assert path.read_text() == "".join(
        json.dumps(row(n), ensure_ascii=False, separators=(",", ":")) + "\n" for n in range(8 * size)
    )


def test_zeros_that_a_crash_left_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    journal = Journal(path)
    journal.append([row(0), row(1)])
    journal.close()
    with path.open("ab") as file:
        file.write(bytes(100))
    journal = Journal(path)
    assert journal.torn
    journal.append([row(2)])
    journal.close()
    assert written(path) == [0, 1, 2]


@pytest.mark.parametrize("line", [b"hello\n", b'{"row": 0, "error": null}\n', b"{}\n"])
def test_a_file_with_other_lines_is_refused_and_left_unchanged(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "out.jsonl"
    journal = Journal(path)
    journal.append([row(0)])
    journal.close()
    with path.open("ab") as file:
        file.write(line + json.dumps(row(1)).encode() + b"\n")
    before = path.read_bytes()
    with pytest.raises(OutputError, match="line 2 is not what a driver wrote"):
        Journal(path)
    assert path.read_bytes() == before


def test_one_driver_at_a_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.jsonl")
    with pytest.raises(OutputError, match="another driver is writing it"):
        Journal(tmp_path / "out.jsonl")
    journal.close()
    Journal(tmp_path / "out.jsonl").close()


def test_a_row_is_never_written_twice(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.jsonl")
    journal.append([row(3)])
    with pytest.raises(AssertionError):
        journal.append([row(3)])
    journal.close()
    assert written(tmp_path / "out.jsonl") == [3]
