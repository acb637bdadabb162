"""Sources: every kind of input gives the same rows."""

import gzip
import hashlib
import io
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serve_app.driver.errors import InputError, RowError
from serve_app.driver.raw_input import RawFile
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


def test_the_error_of_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"saturate\[hf\]; in a checkout: pip install -e '\.\[hf\]'"):
        open_source("hf://openai/gsm8k")


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
        ("~no user/a.jsonl", "no such file or folder"),
    ],
)
def test_an_input_that_can_not_be_read_is_an_error(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "bad.parquet").write_text("x")
    with pytest.raises(InputError, match=message):
        rows(open_source(name if "://" in name or name.startswith("~") else f"{tmp_path}/{name}"))


# Broken files


def compressed(suffix: str, text: bytes) -> bytes:
    name = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}[suffix]
    buffer = pa.BufferOutputStream()
    with pa.CompressedOutputStream(buffer, name) as stream:
        # Several blocks of the compression.
        for start in range(0, len(text), 100_000):
            stream.write(text[start : start + 100_000])
            stream.flush()
    content: bytes = buffer.getvalue().to_pybytes()
    return content


MANY = [{"id": number, "prompt": hashlib.sha256(b"%d" % number).hexdigest() * 3} for number in range(5000)]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst", ".lz4"])
@pytest.mark.parametrize("kept", [0.6, 0.99])
def test_the_rows_before_the_broken_place_are_read_and_the_next_file_too(
    tmp_path: Path, suffix: str, kept: float
) -> None:
    content = compressed(suffix, "".join(json.dumps(row) + "\n" for row in MANY).encode())
    (tmp_path / f"a.jsonl{suffix}").write_bytes(content[: int(len(content) * kept)])
    write(tmp_path / "b.jsonl")
    source = open_source(str(tmp_path))
    *readable, error = rows(source)[: -len(ROWS)]
    assert readable == MANY[: len(readable)]
    # bz2 has blocks of 900 kB.
    assert len(readable) > (kept - (0.6 if suffix == ".bz2" else 0.15)) * len(MANY)
    assert isinstance(error, RowError)
    assert error.type == "unreadable_rows"
    assert f"a.jsonl{suffix}: " in error.message
    assert f"What follows row {len(readable)} of this file" in error.message
    assert rows(source)[-len(ROWS) :] == ROWS
    assert len(rows(source)) == len(readable) + 1 + len(ROWS), "each time the same"


@pytest.mark.parametrize("lines", range(1, 30))
def test_no_row_before_the_end_of_a_truncated_file_is_lost(tmp_path: Path, lines: int) -> None:
    content = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    text = "".join(json.dumps(row) + "\n" for row in MANY[:lines]).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(content.compress(text) + content.flush(zlib.Z_SYNC_FLUSH))
    *readable, error = rows(open_source(str(tmp_path)))
    assert readable == MANY[:lines]
    assert isinstance(error, RowError)


def test_an_input_of_one_file_that_can_not_be_read_at_all_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(JSONL)
    with pytest.raises(InputError, match=r"a\.jsonl\.gz: "):
        rows(open_source(str(tmp_path)))


def test_a_row_group_that_is_broken_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.Table.from_pylist(MANY)
    pq.write_table(table, path, row_group_size=1000, compression="snappy", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(2).column(1).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 40] = b"x" * 40
    path.write_bytes(content)
    found = rows(open_source(str(path)))
    (error,) = [row for row in found if isinstance(row, RowError)]
    assert error.type == "unreadable_rows"
    assert "a.parquet, row group 2: 1,000 rows can't be read" in error.message
    assert [row for row in found if isinstance(row, dict)] == MANY[:2000] + MANY[3000:]


def test_text_of_parquet_that_is_not_utf_8_fails_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    text = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"c"], pa.binary()).buffers())
    pq.write_table(pa.table({"prompt": text}), path)
    first, error, last = rows(open_source(str(path)))
    assert (first, last) == ({"prompt": "a"}, {"prompt": "c"})
    assert isinstance(error, RowError)
    assert "not UTF-8" in error.message


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"])
def test_storage_that_fails_is_not_taken_for_a_broken_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / name)
    write(tmp_path / "b.jsonl")
    source = open_source(str(tmp_path))

    def fail(self: RawFile, size: int = -1) -> bytes:
        raise InputError("the network is gone")

    monkeypatch.setattr(RawFile, "read", fail)
    with pytest.raises(InputError, match="the network is gone"):
        rows(source)


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
