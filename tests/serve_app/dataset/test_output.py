"""Outputs: new, resumed, complete, and after a crash at any step."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from serve_app.api.protocol import JSON
from serve_app.dataset import OutputError
from serve_app.dataset.output import Output
from serve_app.rows.rows import Result, RowTokens
from tests.fakes.disk import KilledError, Life, full, small_files

OPTIONS: JSON = {"--model": "m"}
OTHER: JSON = {"--model": "n"}
INPUT: JSON = {"bytes": 10}
NAMES = ["out.jsonl", "out.parquet"]

SHARED = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)


def row(number: int, error: str | None = None) -> Result:
    line = {
        "row": number,
        "id": f"ä{number}",
        "result": None if error else "x\n" * (number % 3),
        "finish_reason": None if error else "stop",
        "prompt_tokens": None if error else 2,
        "completion_tokens": None if error else 1,
        "attempts": 1,
        "error": {"type": error, "message": error} if error else None,
    }
    text = json.dumps(line, ensure_ascii=False).encode() + b"\n"
    return Result(number, text, error is not None, tokens=RowTokens(*(0, 0, 0) if error else (2, 0, 1)))


def opened(path: Path, options: JSON = OPTIONS, existing: Any = "same", **more: Any) -> Output:
    return Output(path, options, INPUT, existing, **more)


def numbers(path: Path) -> list[int]:
    if path.suffix == ".parquet":
        found: list[int] = pq.read_table(path).column("row").to_pylist()
        return found
    return [json.loads(line)["row"] for line in path.read_bytes().splitlines()]


def finish(path: Path, count: int, life: Life) -> None:
    """Add what an output lacks, and complete it."""
    output = opened(path, reach=life.reach)
    try:
        if output.finished is not None:
            return
        left = [number for number in reversed(range(count)) if number not in output.done(0, count)]
        for at in range(0, len(left), 3):
            output.record([row(number) for number in left[at : at + 3]])
        output.complete()
    finally:
        output.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_process_may_end_before_every_step(tmp_path: Path, name: str) -> None:
    whole = Life(None)
    finish(tmp_path / name, 7, whole)
    expected = (tmp_path / name).read_bytes() if name == "out.jsonl" else None
    assert len(set(whole.steps)) >= 6
    for at in range(len(whole.steps)):
        folder = tmp_path / str(at)
        folder.mkdir()
        life = Life(at)
        with pytest.raises(KilledError):
            finish(folder / name, 7, life)
        finish(folder / name, 7, Life(None))
        assert numbers(folder / name) == list(range(7)), f"killed before step {at}, after {life.steps[-1:]}"
        if expected:
            assert (folder / name).read_bytes() == expected
        assert sorted(file.name for file in folder.iterdir()) == [name, f"{name}.run.db"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_in_order_once_the_output_is_complete(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    output = opened(path)
    output.record([row(2), row(3)])
    output.close()
    output = opened(path)
    assert (output.before, output.finished) == (2, None)
    assert output.done(0, 9) == {2, 3}
    output.record([row(0), row(1, "invalid_row")])
    totals = output.totals()
    assert (totals["rows"], totals["failed_by_type"], totals["prompt_tokens"]) == (4, {"invalid_row": 1}, 6)
    output.complete()
    output.close()
    assert numbers(path) == [0, 1, 2, 3]
    assert sorted(file.name for file in tmp_path.iterdir()) == [name, f"{name}.run.db"]
    assert opened(path).finished == totals


def test_an_output_of_another_run_is_refused_resumed_or_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = opened(path)
    output.record([row(0)])
    output.close()
    with pytest.raises(OutputError, match=r'has 1 rows of another run:\n  --model was "m", is now "n"'):
        opened(path, OTHER)
    output = opened(path, OTHER, "resume")
    assert output.before == 1
    output.close()
    output = opened(path, OPTIONS, "overwrite")
    assert output.before == 0
    output.close()


@pytest.mark.parametrize("existing", ["same", "resume"])
def test_a_file_of_somebody_else_is_refused(tmp_path: Path, existing: Any) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("mine\n")
    with pytest.raises(OutputError, match=r"no out\.jsonl\.run\.db beside it"):
        opened(path, existing=existing)
    assert path.read_text() == "mine\n"
    (tmp_path / "out.jsonl.run.db").write_text("no database, which is longer than a header" * 9)
    with pytest.raises(OutputError, match="file is not a database"):
        opened(path, existing=existing)
    opened(path, existing="overwrite").close()


def test_an_empty_file_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.touch()
    finish(path, 3, Life(None))
    assert numbers(path) == [0, 1, 2]


@pytest.mark.parametrize("existing", ["same", "overwrite"])
def test_one_run_at_a_time(tmp_path: Path, existing: Any) -> None:
    output = opened(tmp_path / "out.jsonl")
    output.record([row(0)])
    with pytest.raises(OutputError, match="another run is writing it"):
        opened(tmp_path / "out.jsonl", existing=existing)
    output.close()
    assert numbers(tmp_path / "out.jsonl") == [0]
    opened(tmp_path / "out.jsonl").close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("complete", [True, False])
def test_an_output_without_rows_is_in_the_way_of_no_run(tmp_path: Path, name: str, complete: bool) -> None:
    output = opened(tmp_path / name)
    if complete:
        output.complete()
    output.close()
    output = opened(tmp_path / name, OTHER)
    output.record([row(0)])
    output.complete()
    output.close()
    assert numbers(tmp_path / name) == [0]


@pytest.mark.parametrize("name", NAMES)
def test_a_complete_output_takes_more_rows_with_resume(tmp_path: Path, name: str) -> None:
    for options, new in ((OPTIONS, (2, 0)), (OTHER, (3, 1))):
        output = opened(tmp_path / name, options, "resume")
        output.record([row(number) for number in new])
        output.complete()
        output.close()
    assert numbers(tmp_path / name) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", NAMES)
def test_a_complete_output_that_was_deleted_is_written_again(tmp_path: Path, name: str) -> None:
    finish(tmp_path / name, 3, Life(None))
    (tmp_path / name).unlink()
    finish(tmp_path / name, 0, Life(None))
    assert numbers(tmp_path / name) == [0, 1, 2]


@SHARED
@given(st.permutations(range(6)), st.integers(0, 6), st.binary(max_size=9), st.data())
def test_a_damaged_copy_is_written_again_from_the_database(
    tmp_path: Path, order: list[int], recorded: int, more: bytes, data: st.DataObject
) -> None:
    path = tmp_path / "out.jsonl"
    output = opened(path, existing="overwrite")
    output.record([row(number) for number in order[:recorded]])
    output.close()
    text = path.read_bytes()
    path.write_bytes(text[: data.draw(st.integers(0, len(text)))] + more)
    damaged = path.stat().st_size != len(text)
    output = opened(path)
    assert output.before == recorded
    if damaged:
        assert numbers(path) == sorted(order[:recorded])
    output.record([row(number) for number in order[recorded:]])
    output.complete()
    output.close()
    assert numbers(path) == list(range(6))


def file(*prompts: str) -> Iterator[JSON]:
    return iter([{"prompt": prompt} for prompt in prompts])


@SHARED
@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1), min_size=1, max_size=4)
)
def test_files_may_grow_and_come_between_runs(tmp_path: Path, runs: list[dict[str, int]]) -> None:
    """Each row is run once; a row without an id has its number as id."""
    path = tmp_path / "out.jsonl"
    path.unlink(missing_ok=True)
    (tmp_path / "out.jsonl.run.db").unlink(missing_ok=True)
    sizes: dict[str, int] = {}
    for more in runs:
        for name, count in more.items():
            sizes[name] = sizes.get(name, 0) + count
        files = {name: [f"{name}{n}" for n in range(sizes[name])] for name in sorted(sizes)}
        input = {"content": [[name, len(prompts)] for name, prompts in files.items()]}
        output = Output(path, OPTIONS, input, "resume")
        left = []
        for one in output.numbered((name, file(*prompts)) for name, prompts in files.items()):
            if one.number not in output.done(one.number, one.number):
                text = to_json({"row": one.number, "id": None, "result": one.values["prompt"], "error": None})
                left.append(Result(one.number, text + b"\n", False))
        output.record(left)
        output.complete()
        output.close()
        found = [json.loads(line) for line in path.read_bytes().splitlines()]
        assert [one["result"] for one in found] == [prompt for some in files.values() for prompt in some]
        assert [one["row"] for one in found] == [one["id"] for one in found] == list(range(len(found)))


def test_rows_whose_copy_finds_no_room_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = opened(path)
    output.record([row(0)])
    with full(path, 150), pytest.raises(OutputError, match="No space left on device"):
        output.record([row(1), row(2)])
    assert numbers(path) == [0]
    output.close()
    output = opened(path)
    assert (output.before, numbers(path)) == (3, [0, 1, 2])
    output.close()


def test_a_disk_that_is_full_takes_all_rows_of_a_group_or_none(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = opened(path)
    output.record([row(0)])
    many = [row(number) for number in range(1, 2000)]
    with small_files(100_000), pytest.raises(OutputError, match=r"disk I/O error|disk is full"):
        output.record(many)
    assert output.totals()["rows"] == 1
    output.record(many)
    output.complete()
    output.close()
    assert numbers(path) == list(range(2000))
