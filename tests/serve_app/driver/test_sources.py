"""Sources: every kind of input gives the same rows."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serve_app.driver.errors import InputError, RowError
from serve_app.driver.sources import Pipe, Source, open_source
from tests.serve_app.driver.bucket import bucket, google_bucket

ROWS = [{"id": f"r{number}", "prompt": f'a, "b"\n{number} ä'} for number in range(25)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = ('"id","prompt"\r\n' + "".join(f'{r["id"]},"a, ""b""\n{n} ä"\r\n' for n, r in enumerate(ROWS))).encode()


def rows(source: Source) -> list[Any]:
    return list(source.values())


def errors(source: Source) -> list[str]:
    return [row.message for row in rows(source) if isinstance(row, RowError)]


def write(path: Path) -> Path:
    match path.suffixes:
        case [".csv"]:
            path.write_bytes(CSV)
        case [".parquet"]:
            pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=10)
        case [".jsonl", ".gz"]:
            path.write_bytes(gzip.compress(JSONL))
        case _:
            path.write_bytes(JSONL)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.csv", "a.parquet", "a.jsonl.gz", "a[1].jsonl"])
def test_a_file(tmp_path: Path, name: str) -> None:
    source = open_source(str(write(tmp_path / name)))
    assert rows(source) == ROWS
    assert source.share_read() in (1.0, None)


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for number, name in enumerate(["b/1.jsonl", "a.jsonl", "c.csv", ".hidden.jsonl", "_tmp.jsonl", "x.txt"]):
        (tmp_path / name).write_text("id\n2" if name == "c.csv" else json.dumps({"id": number}))
    assert rows(open_source(str(tmp_path))) == [{"id": 1}, {"id": 0}, {"id": "2"}]


def test_patterns(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    for name in ["1.jsonl", "2.jsonl", "b/3.jsonl", "b/c/4.jsonl"]:
        (tmp_path / name).write_text(json.dumps({"id": name}))

    def found(pattern: str) -> list[str]:
        return [row["id"] for row in rows(open_source(f"{tmp_path}/{pattern}"))]

    assert found("*.jsonl") == ["1.jsonl", "2.jsonl"]
    assert found("[2-9].jsonl") == ["2.jsonl"]
    assert found("*/*.jsonl") == ["b/3.jsonl"]
    assert found("**/*.jsonl") == ["1.jsonl", "2.jsonl", "b/3.jsonl", "b/c/4.jsonl"]


def test_object_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    parquet = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), parquet)
    with bucket("data", {"in/a.jsonl": JSONL, "in/b.parquet": parquet.getvalue(), "c.txt": b"-"}) as options:
        assert rows(open_source(f"s3://data/in/a.jsonl{options}")) == ROWS
        assert rows(open_source(f"s3://data/in{options}")) == ROWS * 2
        assert rows(open_source(f"s3://data/in/*.parquet{options}")) == ROWS
        assert open_source(f"s3://data/in{options}").fingerprint()["bytes"] > len(JSONL)
        with pytest.raises(InputError, match="no such file"):
            open_source(f"s3://data/other.jsonl{options}")


def test_objects_of_google() -> None:
    with google_bucket("data", {"in/a.jsonl": JSONL, "in/b.csv": CSV, "c.txt": b"-"}) as options:
        assert rows(open_source(f"gs://anonymous@data/in/a.jsonl{options}")) == ROWS
        assert rows(open_source(f"gs://anonymous@data/in/*.jsonl{options}")) == ROWS
        assert len(rows(open_source(f"gs://anonymous@data/in{options}"))) == 2 * len(ROWS)
        with pytest.raises(InputError, match="no such file"):
            open_source(f"gs://anonymous@data/other.jsonl{options}")


def test_a_pipe() -> None:
    assert rows(Pipe(io.BytesIO(JSONL), "jsonl")) == ROWS
    assert rows(Pipe(io.BytesIO(CSV), "csv")) == ROWS
    with pytest.raises(InputError, match="name the file"):
        Pipe(io.BytesIO(), "parquet")


def test_a_hugging_face_dataset_from_a_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "sums").mkdir()
    write(tmp_path / "sums" / "test.parquet")
    source = open_source(f"hf://{tmp_path}/sums#default/test")
    assert rows(source) == ROWS
    assert source.fingerprint() == open_source(f"hf://{tmp_path}/sums#test").fingerprint()
    with pytest.raises(InputError, match="train"):
        open_source(f"hf://{tmp_path}/sums#train")


def test_bad_lines_are_errors_of_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1}\n\n{"id": \n[1]\n{"id": "\xff"}\n{"id": 2}')
    source = open_source(str(path))
    values = rows(source)
    assert [row for row in values if isinstance(row, dict)] == [{"id": 1}, {"id": 2}]
    found = errors(source)
    assert [message.partition(": ")[0] for message in found] == [f"a.jsonl, line {n}" for n in (3, 4, 5)]


def test_bad_lines_of_csv_are_errors_of_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,prompt\n1,a,b\n2,\xff\n3,c\n")
    values = rows(open_source(str(path)))
    assert values[2] == {"id": "3", "prompt": "c"}
    assert "more values than the 2 columns" in values[0].message
    assert "line 3: not UTF-8" in values[1].message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.jsonl", "no such file or folder"),
        ("nothing-*.jsonl", "no file there that ends in"),
        ("a.txt", "--input-format"),
        ("bad.parquet", "not a readable Parquet file"),
        ("s4://bucket/a.jsonl", "Unrecognized filesystem type"),
    ],
)
def test_an_input_that_can_not_be_read_is_an_error(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "bad.parquet").write_text("x")
    with pytest.raises(InputError, match=message):
        rows(open_source(name if "://" in name else f"{tmp_path}/{name}"))


def test_a_format_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(JSONL)
    assert rows(open_source(f"{tmp_path}/a.txt", "jsonl")) == ROWS


def test_a_change_shows_in_the_fingerprint(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    before = open_source(str(path)).fingerprint()
    assert open_source(str(path)).fingerprint() == before
    path.write_bytes(JSONL.replace(b"7", b"8"))
    changed = open_source(str(path)).fingerprint()
    assert changed != before
    assert changed["bytes"] == before["bytes"]
    path.write_bytes(JSONL)
    write(tmp_path / "b.jsonl")
    assert open_source(str(tmp_path)).fingerprint() != before
