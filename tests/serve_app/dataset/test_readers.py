"""Readers: every kind of input gives the same rows, and what is wrong in one is named with its place."""

import csv
import gzip
import hashlib
import io
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.dataset import InputError
from serve_app.dataset.readers import open_source
from tests.serve_app.dataset.bucket import bucket, google_bucket

ROWS = [{"id": f"r{number}", "prompt": f'a, "b"\n{number} ä'} for number in range(25)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = ('"id","prompt"\r\n' + "".join(f'{r["id"]},"a, ""b""\n{n} ä"\r\n' for n, r in enumerate(ROWS))).encode()


def values(source: Any) -> Iterator[Any]:
    return chain.from_iterable(rows for _, rows in source.files())


def rows(source: Any) -> list[Any]:
    return list(values(source))


def piped(stream: Any, format: str) -> list[Any]:
    """Return the rows of standard input."""
    with mock.patch("sys.stdin", SimpleNamespace(buffer=io.BufferedReader(stream))):
        return rows(open_source("-", format))


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
    assert source.share_read() == 1.0


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_the_share_that_is_read_grows_with_the_rows(tmp_path: Path, name: str) -> None:
    source = open_source(str(write(tmp_path / name)))
    shares = [source.share_read() or 0.0 for _ in values(source)]
    assert shares == sorted(set(shares))
    assert shares[0] == pytest.approx(0.04, abs=0.03)
    assert shares[-1] == pytest.approx(1.0)


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
    assert piped(io.BytesIO(JSONL), "jsonl") == ROWS
    assert piped(io.BytesIO(CSV), "csv") == ROWS
    with pytest.raises(InputError, match="name the file"):
        piped(io.BytesIO(b""), "parquet")


HUB = "datasets/me/sums@refs/convert/parquet"


def hub(text: str) -> tuple[Any, str]:
    """Return the file system of a Hub with a dataset of three configs, in memory."""
    system = fsspec.filesystem("memory")
    parquet = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), parquet)
    for folder in ("default/train", "default/test", "other/test", "big/partial-train"):
        system.pipe(f"/{HUB}/{folder}/0000.parquet", parquet.getvalue())
    system.pipe("/datasets/me/sums/data/a.jsonl", JSONL)
    return system, text.replace("hf://", "/")


def test_a_dataset_of_the_hugging_face_hub() -> None:
    for text in ("hf://me/sums", "hf://me/sums#test", "hf://me/sums#other/test"):
        assert rows(open_source(text, filesystems=hub)) == ROWS
    assert rows(open_source("hf://datasets/me/sums/**/*.jsonl", filesystems=hub)) == ROWS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf://me/sums#train2", "no split 'train2'; there are: test, train"),
        ("hf://me/sums#nothing/train", "no config 'nothing'; there are: big, default, other"),
        ("hf://me/sums#big/train", "only a part of this split: name its files, as in hf://datasets/me/sums/"),
        ("hf://me/unknown", "no such dataset"),
        ("hf:///data/sums", "a local folder is named without hf://"),
        ("hf://gsm8k", "is hf://OWNER/NAME#CONFIG/SPLIT"),
    ],
)
def test_a_dataset_that_is_not_there_is_told(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_source(text, filesystems=hub)


def test_the_error_of_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"the extra hf: pip install -e '\.\[hf\]'"):
        open_source("hf://openai/gsm8k")


BROKEN: dict[str, tuple[bytes, str]] = {
    "end.jsonl": (b'\xef\xbb\xbf{"id": 1}\n\n{"id": \n{"id": 2}', "line 3: not valid JSON"),
    "list.jsonl": (b'{"id": 1}\n[1]\n', "line 2: must be a JSON object"),
    "bytes.jsonl": (b'{"id": 1}\n{"id": "\xff"}\n', "line 2: not valid JSON"),
    "more.csv": (b"id\n1\n2,b\n3\n", "line 3: 2, more values than the 1 columns of the header"),
    "fewer.csv": (b"id,b\n1,a\n\n2\n", "line 4: 1, fewer values than the 2 columns of the header"),
    "bytes.csv": (b"id,b\n1,a\n2,\xff\n", "line 3: not UTF-8"),
    "stray.csv": (b'id,b\n1,a\n2,"5 inch\n3,c\n', "line 3: unexpected end of data"),
    "quoted.csv": (b'id,b\n1,"a\nb"\n2,"e"f\n', "line 4: ',' expected after '\"'"),
    "cut.jsonl.gz": (
        gzip.compress(b'{"id": 1}\n' + b'{"id": 2}\n' * 9)[:-8],
        r"cut\.jsonl\.gz: Compressed file",
    ),
}
"""Files that are broken after a row with the id 1, and why."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_stops_with_its_place_after_the_rows_before(tmp_path: Path, name: str) -> None:
    content, message = BROKEN[name]
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    (tmp_path / f"b-{name}").write_bytes(content)
    write(tmp_path / "zz.jsonl")
    read: list[Any] = []
    with pytest.raises(InputError, match=message) as caught:
        deque(map(read.append, values(open_source(str(tmp_path)))))
    assert read[: len(ROWS)] == ROWS
    assert name.endswith(".gz") or int(read[len(ROWS)]["id"]) == 1
    assert str(caught.value).startswith(f"b-{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.jsonl", "no such file or folder"),
        ("nothing-*.jsonl", "no file there that ends in"),
        ("a.txt", "--input-format"),
        ("bad.parquet", "not a readable Parquet file"),
        ("s4://bucket/a.jsonl", "Protocol not known: s4"),
        ("~no user/a.jsonl", "no such file or folder"),
    ],
)
def test_an_input_that_can_not_be_read_is_an_error(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "bad.parquet").write_text("x")
    with pytest.raises(InputError, match=message):
        rows(open_source(name if "://" in name or name.startswith("~") else f"{tmp_path}/{name}"))


# Broken files


MANY = [{"id": number, "prompt": hashlib.sha256(b"%d" % number).hexdigest() * 3} for number in range(5000)]


def test_a_lone_file_that_can_not_be_read_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(JSONL)
    with pytest.raises(InputError, match=r"a\.jsonl\.gz: "):
        rows(open_source(str(tmp_path)))


def test_a_part_of_parquet_that_is_broken_is_told_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.Table.from_pylist(MANY)
    pq.write_table(table, path, row_group_size=1000, compression="snappy", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(2).column(1).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 40] = b"x" * 40
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.parquet, after row 2,000: "):
        rows(open_source(str(path)))


def test_text_of_parquet_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    text = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"c"], pa.binary()).buffers())
    pq.write_table(pa.table({"prompt": text}), path)
    with pytest.raises(InputError, match=r"a\.parquet, rows 1 to 3: a text is not UTF-8"):
        rows(open_source(str(path)))


def test_a_format_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(JSONL)
    assert rows(open_source(f"{tmp_path}/a.txt", "jsonl")) == ROWS


def test_a_change_shows_in_the_fingerprint(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    os.utime(path, (1, 1))
    before = open_source(str(path)).fingerprint()
    assert open_source(str(path)).fingerprint() == before
    path.write_bytes(JSONL.replace(b"7", b"8"))
    changed = open_source(str(path)).fingerprint()
    assert {key for key in changed if changed[key] != before[key]} == {"written"}
    path.write_bytes(JSONL)
    os.utime(path, (1, 1))
    assert open_source(str(path)).fingerprint() == before
    write(tmp_path / "b.jsonl")
    assert open_source(str(tmp_path)).fingerprint() != before


def test_no_content_is_read_for_a_fingerprint(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")

    class Unread(fsspec.implementations.local.LocalFileSystem):  # type: ignore[misc]
        def _open(self, *arguments: Any, **options: Any) -> Any:
            raise AssertionError("read")

    source = open_source(str(tmp_path), filesystems=lambda text: (Unread(skip_instance_cache=True), text))
    assert source.fingerprint()["bytes"] == len(JSONL)


# Names


def test_a_pattern_takes_no_file_that_it_does_not_name(tmp_path: Path) -> None:
    for name in ["data/a.jsonl", "data/b/a.jsonl", "data/b/c/a.jsonl", "data/zza.jsonl", "data/b/zza.jsonl"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"id": name}))

    def found(pattern: str) -> list[str]:
        return [row["id"] for row in rows(open_source(f"{tmp_path}/{pattern}"))]

    assert found("data/**/a.jsonl") == ["data/a.jsonl", "data/b/a.jsonl", "data/b/c/a.jsonl"]
    assert found("data/**/b/*.jsonl") == ["data/b/a.jsonl", "data/b/zza.jsonl"]
    with pytest.raises(InputError, match="entire path component"):
        found("data/**a.jsonl")


def test_links_are_followed(tmp_path: Path) -> None:
    # As Kubernetes mounts a ConfigMap.
    (tmp_path / "in" / "..v1").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    write(tmp_path / "in" / "..v1" / "a.jsonl")
    write(tmp_path / "other" / "b.jsonl")
    (tmp_path / "in" / "a.jsonl").symlink_to(tmp_path / "in" / "..v1" / "a.jsonl")
    (tmp_path / "in" / "more").symlink_to(tmp_path / "other")
    assert rows(open_source(f"{tmp_path}/in")) == ROWS * 2
    assert rows(open_source(f"{tmp_path}/in/*.jsonl")) == ROWS


@pytest.mark.parametrize("name", ["pipe", "pipe.jsonl.gz", "pipe.csv"])
def test_a_named_pipe(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    content = {"pipe": JSONL, "pipe.jsonl.gz": gzip.compress(JSONL), "pipe.csv": CSV}[name]
    writing = threading.Thread(target=(tmp_path / name).write_bytes, args=[content])
    writing.start()
    source = open_source(f"{tmp_path}/{name}")
    assert source.silent
    assert rows(source) == ROWS
    writing.join()


# A JSON array, and other forms


class Trickle(io.RawIOBase):
    """Bytes that come few at a time."""

    def __init__(self, content: bytes, few: int) -> None:
        self._content, self._few = io.BytesIO(content), few

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self._content.read(min(self._few, len(buffer)))
        buffer[: len(found)] = found
        return len(found)


def in_pieces(content: bytes, few: int, format: str = "json") -> list[Any]:
    return piped(Trickle(content, few), format)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(alphabet='a"\\[]{},: \n\u00e9', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("k}", max_size=2), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text('x"', max_size=2), json_values, max_size=3)


@given(st.lists(objects, max_size=6), st.sampled_from([None, 1]), st.sampled_from([1, 2, 7, 1000]))
def test_a_json_array_is_read_as_it_was_written(table: list[Any], indent: int | None, few: int) -> None:
    assert in_pieces(json.dumps(table, indent=indent).encode(), few) == table


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[\n {"id": 1},\n {"id": tru}\n]', "not valid JSON: .* at line 3 column"),
        ('[{"id": 1}, {"id": 2}, {"id"', "not valid JSON: EOF"),
        ('[{"id": 1}, {"id": 2}] [', "not valid JSON: trailing characters"),
        ('[{"id": 1}, 5]', "element 2: must be a JSON object"),
    ],
)
def test_an_array_that_is_wrong_is_told_with_the_place(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=message):
        rows(open_source(f"{tmp_path}/a.json"))


def test_separators(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id;prompt\n1;"a;b"\n')
    (tmp_path / "a.tsv").write_text("id\tprompt\n1\ta;b\n")
    found = [{"id": "1", "prompt": "a;b"}]
    assert rows(open_source(f"{tmp_path}/a.csv", separator=";")) == found
    assert rows(open_source(f"{tmp_path}/a.tsv")) == found
    (tmp_path / "b.csv").write_text("a;b\nc\n")
    assert rows(open_source(f"{tmp_path}/b.csv", separator=",")) == [{"a;b": "c"}]
    write(tmp_path / "c.jsonl")
    with pytest.raises(InputError, match="--separator is for CSV"):
        rows(open_source(f"{tmp_path}/c.jsonl", separator=";"))


def test_text_in_columns_of_bytes(tmp_path: Path) -> None:
    kind = pa.struct([("content", pa.binary())])
    table = pa.table(
        {
            "prompt": pa.array(["ä".encode(), b"\xff"], pa.binary()),
            "messages": pa.array([[{"content": b"x"}], None], pa.list_(kind)),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert rows(open_source(str(tmp_path))) == [
        {"prompt": "ä", "messages": [{"content": "x"}]},
        {"prompt": b"\xff", "messages": None},
    ]


LONG = {
    "a.jsonl": (
        b'{"id": 1}\n{"id": "' + b"x" * (64 << 20) + b'"}\n{"id": 2}\n',
        "line 2: longer than 67,108,864 bytes",
    ),
    "a.csv": (
        b"id,prompt\n1,a\n2," + b"x" * (16 << 20) + b"\n3,c\n",
        "line 3: longer than 16,777,216 characters",
    ),
    "b.csv": (b'id,prompt\n0,"a\n' + (b"x" * 99_999 + b"\n") * 170, "line 2: field larger than field limit"),
}
"""Files with a line or a field that doesn't end within the limit, and the error."""


@pytest.mark.parametrize("name", LONG)
def test_a_line_and_a_field_without_an_end_are_bounded(tmp_path: Path, name: str) -> None:
    content, message = LONG[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name}, {message}"):
        rows(open_source(f"{tmp_path}/{name}"))


def test_values_of_csv_are_text_and_may_span_lines() -> None:
    assert piped(io.BytesIO('\ufeffid,prompt\n1,"a\nb"\n2,\n'.encode()), "csv") == [
        {"id": "1", "prompt": "a\nb"},
        {"id": "2", "prompt": ""},
    ]


@given(st.lists(st.lists(st.text(alphabet='a",\n\r ä', max_size=6), min_size=2, max_size=2), max_size=20))
def test_csv_that_a_library_has_written_is_read_as_it_was(table: list[list[str]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["id", "prompt"], *table])
    found = piped(io.BytesIO(text.getvalue().encode()), "csv")
    assert found == [dict(zip(("id", "prompt"), row, strict=True)) for row in table]
