"""Outputs: new, resumed and complete, as JSONL and as Parquet."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import OutputError
from serve_app.dataset.formats import read_jsonl
from serve_app.driver.chunks import Item
from serve_app.driver.manifest import Manifest, manifest_path
from serve_app.driver.output import Output, check_output

MANIFEST = Manifest({"--model": "m"}, {"bytes": 10})
OTHER = Manifest({"--model": "n"}, {"bytes": 10})
DETAIL = {"finish_reason": "stop", "prompt_tokens": 2, "completion_tokens": 1}


def row(number: int) -> JSON:
    return Item(number, f"r{number}", "").done("x", DETAIL, 1)


def numbers(path: Path) -> list[int]:
    if path.suffix == ".parquet":
        found: list[int] = pq.read_table(path).column("row").to_pylist()
        return found
    with path.open("rb") as file:
        values: Any = read_jsonl(file, path.name, lambda count: None)
        return [one["row"] for one in values]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_rows_are_in_order_once_the_output_is_complete(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    output = Output(path, MANIFEST)
    output.append([row(2), row(3)])
    output.close()

    output = Output(path, MANIFEST)
    assert (output.before, output.finished) == (2, None)
    assert 3 in output.done
    output.append([row(0), row(1)])
    output.sync()
    assert output.totals["rows"] == 4
    output.complete()
    assert numbers(path) == [0, 1, 2, 3]
    assert sorted(file.name for file in tmp_path.iterdir()) == [name, manifest_path(path).name]

    finished = Output(path, MANIFEST).finished
    assert finished is not None
    assert finished["rows"] == 4


def test_an_output_of_another_run_is_refused_resumed_or_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = Output(path, MANIFEST)
    output.append([row(0)])
    output.close()
    with pytest.raises(OutputError, match=r'has 1 rows of another run:\n  --model was "m", is now "n"'):
        Output(path, OTHER)
    output = Output(path, OTHER, "resume")
    assert output.before == 1
    output.close()
    output = Output(path, MANIFEST, "overwrite")
    assert output.before == 0
    output.close()


def test_a_complete_parquet_file_takes_no_more_rows(tmp_path: Path) -> None:
    output = Output(tmp_path / "out.parquet", MANIFEST)
    output.append([row(0)])
    output.complete()
    with pytest.raises(OutputError, match="nothing can be added"):
        Output(tmp_path / "out.parquet", OTHER, "resume")


@pytest.mark.parametrize("existing", ["same", "resume"])
def test_a_file_without_a_manifest_is_refused(tmp_path: Path, existing: Any) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("mine\n")
    with pytest.raises(OutputError, match="no manifest beside it"):
        Output(path, MANIFEST, existing)
    assert path.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("s3://bucket/out.jsonl", "local file"),
        ("out.txt", "must end in"),
        ("no/folder/out.jsonl", "no folder"),
    ],
)
def test_a_path_that_can_not_be_written_is_an_error(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(OutputError, match=message):
        check_output(Path(name) if "://" in name else tmp_path / name)


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("complete", [True, False])
def test_an_output_without_rows_does_not_stand_in_the_way_of_another_run(
    tmp_path: Path, name: str, complete: bool
) -> None:
    output = Output(tmp_path / name, MANIFEST)
    if complete:
        output.complete()
    else:
        output.close()
    output = Output(tmp_path / name, OTHER)
    output.append([row(0)])
    output.complete()
    assert numbers(tmp_path / name) == [0]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_rows_of_a_killed_run_are_counted_and_kept(tmp_path: Path, name: str) -> None:
    output = Output(tmp_path / name, MANIFEST)
    output.append([row(0), row(1)])
    output._open._file.close()  # As a kill does: the manifest says that there are no rows.
    with pytest.raises(OutputError, match="has 2 rows of another run"):
        Output(tmp_path / name, OTHER)
    output = Output(tmp_path / name, MANIFEST)
    assert output.before == 2
    output.close()
