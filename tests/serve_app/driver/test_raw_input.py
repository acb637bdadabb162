"""Bytes of input files: errors of the storage, and content that is broken."""

import io
import zlib
from pathlib import Path

import pyarrow as pa
import pytest

from serve_app.driver.errors import InputError
from serve_app.driver.raw_input import CorruptError, Decompressed, RawFile

TEXT = b"".join(b"line %d\n" % number for number in range(100))


class Stored:
    """A stored file that can't be read from some place on."""

    def __init__(self, content: bytes, broken_at: int) -> None:
        self._content = io.BytesIO(content)
        self._broken_at = broken_at

    def read(self, size: int | None = None) -> bytes:
        if self._content.tell() >= self._broken_at:
            raise OSError("AWS Error NETWORK_CONNECTION")
        return self._content.read(size)


def test_an_error_of_the_storage_names_the_file() -> None:
    raw = RawFile(Stored(TEXT, 20), "bucket/a.jsonl")
    assert raw.read(20) == TEXT[:20]
    with pytest.raises(InputError, match=r"bucket/a\.jsonl: AWS Error") as caught:
        raw.read(20)
    assert not isinstance(caught.value, CorruptError)


def test_a_file_can_be_read_from_any_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(TEXT)
    with pa.OSFile(str(tmp_path / "a")) as file:
        raw = RawFile(file, "a")
        assert raw.seekable()
        assert raw.seek(7) == raw.tell() == 7
        assert raw.read(6) == TEXT[7:13]
        assert raw.read() == TEXT[13:]


def test_all_bytes_before_the_broken_place_are_read() -> None:
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    content = packer.compress(TEXT) + packer.flush(zlib.Z_SYNC_FLUSH)

    def begin() -> RawFile:
        return RawFile(pa.BufferReader(content), "a.gz")

    stream = io.BufferedReader(Decompressed(begin, "gzip", "a.gz"), 64)
    assert [next(stream) for _ in range(100)] == TEXT.splitlines(keepends=True)
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"a\.gz: Truncated"):
            next(stream)
