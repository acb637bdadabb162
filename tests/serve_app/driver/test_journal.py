"""The journal after a crash at any byte: no written row is lost, none is there twice."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_app.dataset.errors import DiskError, OutputError
from serve_app.driver.chunks import Item
from serve_app.driver.journal import Journal, write_whole
from tests.serve_app.driver.disk import failing_sync, full

SHARED = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)


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


def test_rows_that_a_failed_sync_may_have_lost_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    journal = Journal(path)
    journal.append([row(0), row(1)])
    journal.sync()
    journal.append([row(2)])
    with failing_sync(path, times=1):
        with pytest.raises(DiskError, match="Input/output error"):
            journal.sync()
        # The kernel reports the failure once. Nothing is taken for written after it.
        for step in (journal.sync, lambda: journal.append([row(3)]), journal.close):
            with pytest.raises(DiskError, match="Input/output error"):
                step()
    assert journal.totals.rows == 2
    assert written(path) == [0, 1]
    journal = Journal(path)
    assert 2 not in journal.done
    journal.close()


def test_rows_of_a_killed_run_are_synced_before_they_count_as_done(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    journal = Journal(path)
    journal.append([row(0)])
    journal.close()
    with failing_sync(path), pytest.raises(DiskError):
        Journal(path)
    assert written(path) == [0]


@pytest.mark.parametrize("room", [0, 1, 150])
def test_a_full_disk_takes_all_rows_of_a_chunk_or_none(tmp_path: Path, room: int) -> None:
    path = tmp_path / "out.jsonl"
    journal = Journal(path)
    journal.append([row(0)])
    with full(path, room):
        for _ in range(2):
            with pytest.raises(DiskError, match="No space left on device"):
                journal.append([row(1), row(2)])
    journal.close()
    assert written(path) == [0]
    assert journal.totals.rows == 1
    journal = Journal(path)
    assert not journal.torn
    journal.append([row(1), row(2)])
    journal.close()
    assert written(path) == [0, 1, 2]


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    journal = Journal(path)
    journal.append([row(0) | {"id": float("nan")}, row(1) | {"id": float("inf")}])
    journal.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["id"] for line in lines] == [None, None]


def test_a_file_that_can_not_be_replaced_stays_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_whole(path, iter([b"one"]))
    with (
        failing_sync(tmp_path / "report.json.draft"),
        pytest.raises(DiskError, match=r"report\.json: Input/output"),
    ):
        write_whole(path, iter([b"other"]))
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    assert path.read_bytes() == b"one"
