"""Sources of rows: files, folders and patterns, local or in object storage; a pipe; Hugging Face."""

import hashlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from serve_app.api.protocol import JSON
from serve_app.driver.errors import InputError, RowError, extra
from serve_app.driver.raw_input import BLOCK, CorruptError, Decompressed, RawFile
from serve_app.driver.rows import Values, read_csv, read_jsonl, read_parquet
from serve_app.system.home import below_home

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
SAMPLED_BLOCKS = 64
"""Blocks of 1 MiB in a fingerprint: all of an input up to this size, else evenly spaced ones."""


class Source(Protocol):
    """An input of rows."""

    def values(self) -> Values:
        """Yield each row's columns or its error, always in the same order."""

    def fingerprint(self) -> JSON:
        """Return values that differ for another input, and for this one after a change."""

    def share_read(self) -> float | None:
        """Return the share of the input that was read, 0 to 1; None if unknown."""


def open_source(text: str, format: str | None = None) -> Source:
    """Open an input.

    Args:
        text: "-", a path, a folder, a glob, an s3:// or gs:// URI of one of these, or
            hf://DATASET#CONFIG/SPLIT.
        format: "jsonl", "csv" or "parquet"; None: by the name.

    Raises:
        InputError: There is no such input, or no file of a known format in it.
    """
    if text == "-":
        return Pipe(sys.stdin.buffer, format or "jsonl")
    if text.startswith("hf://"):
        return HubDataset(text)
    return Files(text, format)


class Files:
    """Files, read in the order of their names.

    Args:
        text: A path, a folder or a glob; local, or a URI that pyarrow knows.
        format: Format of all files; None: by their names.
    """

    def __init__(self, text: str, format: str | None = None) -> None:
        self._system, path = _filesystem(text)
        self._files = self._find(path, text, format)
        self._size = sum(int(file.size or 0) for file in self._files)
        self._read: float | None = 0.0
        self._format = format

    def values(self) -> Values:
        """Yield the rows of all files."""
        for file in self._files:
            yield from self._readable(file)
        self._read = float(self._size)

    def fingerprint(self) -> JSON:
        """Return digests of the files' names, sizes and content."""
        digest = hashlib.blake2b(digest_size=16)
        blocks = max(2, SAMPLED_BLOCKS // len(self._files))
        for file in self._files:
            with self._system.open_input_file(file.path) as stream:
                for offset in _offsets(file.size or 0, blocks):
                    stream.seek(offset)
                    digest.update(stream.read(BLOCK))
        names = [[PurePosixPath(file.path).name, file.size] for file in self._files]
        listing = hashlib.blake2b(repr(names).encode(), digest_size=16).hexdigest()
        return {"files": len(names), "bytes": self._size, "names": listing, "content": digest.hexdigest()}

    def share_read(self) -> float | None:
        """Return the share that was read; None for compressed files."""
        if self._read is None or not self._size:
            return None
        return min(1.0, self._read / self._size)

    def _find(self, path: str, text: str, format: str | None) -> list[Any]:
        from pyarrow.fs import FileSelector, FileType

        try:
            (info,) = self._system.get_file_info([path.rstrip("/") or "/"])
            # A file's name may contain pattern characters.
            base = path if info.type != FileType.NotFound else _fixed_part(path)
            if base != path:
                (info,) = self._system.get_file_info([base])
            if info.type == FileType.File:
                if not format and not _format(info.path):
                    kinds = ", ".join(FORMATS)
                    raise InputError(f"{text}: the name ends in none of {kinds}; say --input-format")
                return [info]
            if info.type == FileType.NotFound:
                raise InputError(f"{text}: no such file or folder")
            found = self._system.get_file_info(FileSelector(base, recursive=True))
        except OSError as error:
            raise InputError(f"{text}: {error}") from None
        files = [
            file
            for file in found
            if file.type == FileType.File
            and (_format(file.path) or format)
            and not _hidden(file.path[len(base) :])
            and (base == path or _matches(file.path, path))
        ]
        if not files:
            raise InputError(f"{text}: no file there that ends in one of {', '.join(FORMATS)}")
        return sorted(files, key=lambda file: str(file.path))

    def _readable(self, file: Any) -> Values:
        """Yield the rows of a file; if it is broken, those before that place and one error for the others."""
        count = 0
        try:
            for row in self._values(file):
                yield row
                count += 1
        except CorruptError as error:
            if not count and len(self._files) == 1:
                # Nothing of the input can be read: rather a wrong name or format.
                raise
            yield RowError("unreadable_rows", f"{error}. What follows row {count} of this file can't be read")

    def _values(self, file: Any) -> Values:
        name = PurePosixPath(file.path).name
        format = self._format or _format(file.path)
        compression = COMPRESSED.get(PurePosixPath(file.path).suffix)
        try:
            if format == "parquet":
                with self._system.open_input_file(file.path) as seekable:
                    raw = RawFile(seekable, file.path)
                    yield from read_parquet(raw, name, self._advance, file.size or 0)
                return
            with ExitStack() as opened:

                def begin() -> RawFile:
                    stored = self._system.open_input_stream(file.path, compression=None)
                    return RawFile(opened.enter_context(stored), file.path)

                if compression:
                    self._read = None
                content = Decompressed(begin, compression, name) if compression else begin()
                stream = io.BufferedReader(content, BLOCK)
                yield from (read_csv if format == "csv" else read_jsonl)(stream, name, self._advance)
        except OSError as error:
            raise InputError(f"{file.path}: {error}") from None

    def _advance(self, count: float) -> None:
        if self._read is not None:
            self._read += count


class Pipe:
    """A stream that can be read only once, such as standard input.

    Args:
        stream: The stream.
        format: "jsonl" or "csv".
    """

    def __init__(self, stream: IO[bytes], format: str) -> None:
        if format == "parquet":
            raise InputError("-: Parquet can't be read from a pipe; name the file")
        self._stream = stream
        self._format = format

    def values(self) -> Values:
        """Yield the rows as they arrive."""
        read = read_csv if self._format == "csv" else read_jsonl
        return read(self._stream, "standard input", lambda count: None)

    def fingerprint(self) -> JSON:
        """Return the format; the content of a pipe can't be known in advance."""
        return {"pipe": self._format}

    def share_read(self) -> float | None:
        """Return None: the length of a pipe is unknown."""
        return None


class HubDataset:
    """A Hugging Face dataset, streamed.

    Args:
        text: hf://DATASET, hf://DATASET#CONFIG/SPLIT or hf://DATASET#SPLIT; DATASET may be a local folder.
    """

    def __init__(self, text: str) -> None:
        path, _, part = text.removeprefix("hf://").partition("#")
        config, _, split = part.rpartition("/")
        try:
            import datasets
        except ImportError:
            raise InputError(f"{text}: this needs {extra('hf')}") from None
        try:
            loaded = datasets.load_dataset(path, config or None, split=split or "train", streaming=True)
        except Exception as error:
            # The library has errors of its own for what can't be found or read.
            raise InputError(f"{text}: {str(error) or type(error).__name__}") from None
        self._name = text
        self._rows: Any = loaded
        info = loaded.info
        size = (info.splits or {}).get(split or "train")
        self._total: int | None = size.num_examples if size and size.num_examples else None
        self._fingerprint: JSON = {
            "dataset": path,
            "config": info.config_name,
            "split": split or "train",
            "version": str(info.version),
            "rows": self._total,
            "checksums": sorted(map(str, info.download_checksums or {})),
        }
        if Path(path).is_dir():
            self._fingerprint |= Files(os.path.abspath(path)).fingerprint()
        self._read = 0

    def values(self) -> Values:
        """Yield the rows."""
        try:
            for row in self._rows:
                self._read += 1
                yield row if isinstance(row, dict) else RowError("invalid_row", "not an object with columns")
        except Exception as error:
            # The library has errors of its own for a network that fails and for broken files.
            text = str(error) or type(error).__name__
            raise InputError(f"{self._name}, after row {self._read}: {text}") from None

    def fingerprint(self) -> JSON:
        """Return the hub's description of the dataset; of a local one, that of its files."""
        return self._fingerprint

    def share_read(self) -> float | None:
        """Return the share that was read; None if the dataset has no length."""
        return self._read / self._total if self._total else None


def _filesystem(text: str) -> tuple[Any, str]:
    """Return the file system of an input and the path in it."""
    try:
        import pyarrow as pa
        from pyarrow.fs import FileSystem, LocalFileSystem
    except ImportError:
        raise InputError(f"reading files needs {extra('driver')}") from None

    if "://" not in text:
        return LocalFileSystem(), below_home(text).absolute().as_posix()
    try:
        system, path = FileSystem.from_uri(_quoted(text))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{text}: {error}") from None
    return system, path.replace("%2A", "*").replace("%5B", "[").replace("%5D", "]")


def _quoted(uri: str) -> str:
    """Return a URI with its pattern characters escaped, since parsers refuse them."""
    return uri.replace("*", "%2A").replace("[", "%5B").replace("]", "%5D")


def _format(path: str) -> str | None:
    parts = PurePosixPath(path)
    if parts.suffix in COMPRESSED:
        parts = parts.with_suffix("")
    return FORMATS.get(parts.suffix.lower())


def _hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in PurePosixPath(path).parts)


def _fixed_part(pattern: str) -> str:
    """Return the part of a path before the first component with a pattern."""
    parts = pattern.split("/")
    fixed = [index for index, part in enumerate(parts) if set(part) & set("*?[")]
    return "/".join(parts[: fixed[0]]) or "/" if fixed else pattern.rstrip("/") or "/"


def _matches(path: str, pattern: str) -> bool:
    """Return whether a path matches a pattern; `*` matches within a folder, `**/` any number of folders."""
    if "**" in pattern:
        return fnmatchcase(path, pattern.replace("**/", "*"))
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _offsets(size: int, blocks: int) -> Iterator[int]:
    """Yield the offsets of blocks: all of a small file, else the first, the last and some between."""
    if size <= blocks * BLOCK:
        yield from range(0, size, BLOCK)
    else:
        yield from ((size - BLOCK) * number // (blocks - 1) for number in range(blocks))
