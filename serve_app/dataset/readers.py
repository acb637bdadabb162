"""Inputs of rows: files on any file system, compressed or not, pipes, datasets of the Hugging Face Hub."""

import hashlib
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol, cast

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import InputError
from serve_app.dataset.formats import (
    BLOCK,
    CorruptError,
    Values,
    read_parquet,
    read_text,
)
from serve_app.settings.fields import below_home
from serve_app.system.distribution import extra

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
"""Formats by the ending of a name. `jsonl` and `json` have one reader: both may be lines or an array."""

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".lz4": "lz4"}

ARROW_SCHEMES = {"s3", "gs", "gcs", "hdfs", "viewfs"}
"""Schemes that pyarrow has drivers for; fsspec needs a package for each other scheme."""

ARROW_CODECS = {"zstd", "lz4"}
"""Compressions that pyarrow decodes; fsspec would need a package for each."""

VERSIONS = (
    "ETag",
    "etag",
    "md5Hash",
    "blob_id",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)
"""Keys of fsspec's file details whose values change with a file; each file system has other keys."""

FileSystems = Callable[[str], tuple[Any, str]]
"""Returns fsspec's file system of an input, and the path in it."""


# Sources


class Source(Protocol):
    """An input of rows.

    Attributes:
        silent: Whether a read may wait without end, as for a pipe.
    """

    silent: bool

    def files(self) -> Iterator[tuple[str, Values]]:
        """Yield the name of each file, and its rows, always in the same order.

        Reading the rows raises a CorruptError for a row that can't be read, and an InputError if the storage
        fails.
        """

    def fingerprint(self) -> JSON:
        """Return values that identify the input, and that differ after a change of the input.

        `content` has the name and the size of each file.
        """

    def share_read(self) -> float | None:
        """Return the share of the input that was read, 0 to 1; None if unknown."""


def values_of(source: Source) -> Values:
    """Return the rows of all files of an input, each with its columns.

    Raises:
        CorruptError: A row can't be read.
        InputError: The storage fails.
    """
    return chain.from_iterable(values for _, values in source.files())


def open_source(
    text: str,
    format: str | None = None,
    separator: str | None = None,
    *,
    filesystems: FileSystems | None = None,
) -> Source:
    """Open an input.

    Args:
        text: "-", a path, a folder, a pattern, a pipe; a URI of one of these, such as s3:// or gs://; or
            hf://OWNER/NAME#CONFIG/SPLIT.
        format: A value of `FORMATS`; None: by the name.
        separator: Separator of the columns of CSV; None: by the format.
        filesystems: Other file systems, for tests.

    Raises:
        InputError: There is no such input, or no file of a known format in it.
    """
    if text == "-":
        return Pipe(cast(io.BufferedReader, sys.stdin.buffer), format or "jsonl", separator)
    if "://" not in text:
        path = below_home(text).absolute().as_posix()
        if _is_pipe(path):
            try:
                stream = open(path, "rb")  # noqa: SIM115
            except OSError as error:
                raise InputError(f"{text}: {error.strerror or error}") from None
            return Pipe(stream, format or _format(path) or "jsonl", separator, path)
    filesystems = filesystems or _filesystem
    if text.startswith("hf://"):
        text = _converted(text, filesystems)
    return Files(text, *filesystems(text), format, separator)


class _File(NamedTuple):
    """A file of the input: path, name in messages, size, and a value that changes with the content."""

    path: str
    name: str
    size: int
    version: str


class Files:
    """Files, read in the order of their paths.

    Args:
        text: The input, as named by the user.
        system: fsspec's file system.
        path: A path, a folder or a pattern in it. `*` matches within a folder, `**` any number of folders.
        format: Format of all files; None: by their names.
        separator: Separator of the columns of CSV.
    """

    silent = False

    def __init__(
        self, text: str, system: Any, path: str, format: str | None = None, separator: str | None = None
    ) -> None:
        self._system = system
        # pyarrow's drivers read an object in one request if it is opened without seeking.
        self._arrow = type(system).__name__ == "ArrowFSWrapper"
        self._format = format
        self._separator = separator
        self._files = self._find(path, text)
        self._size = sum(file.size for file in self._files)
        self._read: float | None = 0.0

    def files(self) -> Iterator[tuple[str, Values]]:
        """Yield the name and the rows of each file."""
        for file in self._files:
            yield file.name, self._values(file)
        self._read = float(self._size)

    def fingerprint(self) -> JSON:
        """Return the files' names and sizes, and a digest of their versions; no content is read."""
        versions = [file.version for file in self._files]
        return {
            "files": len(self._files),
            "bytes": self._size,
            "content": [[file.name, file.size] for file in self._files],
            "written": _digest(versions),
        }

    def share_read(self) -> float | None:
        """Return the share that was read; None for compressed files."""
        if self._read is None or not self._size:
            return None
        return min(1.0, self._read / self._size)

    def _find(self, path: str, text: str) -> list[_File]:
        path = path.rstrip("/") or "/"
        base = path
        try:
            # A file's name may contain pattern characters.
            details = self._details(path)
            if details is None:
                base = _fixed_part(path)
                if base == path or self._details(base) is None:
                    raise InputError(f"{text}: no such file or folder")
                found = list(self._resolved(self._system.glob(path, detail=True), deep=False))
            elif details["type"] == "directory":
                found = list(self._resolved(self._system.find(path, detail=True), deep=True))
            else:
                if not self._format and not _format(path):
                    kinds = ", ".join(FORMATS)
                    raise InputError(f"{text}: the name ends in none of {kinds}; say --input-format")
                base = path.rpartition("/")[0]
                return [self._file(path, base, details)]
        except InputError:
            raise
        except Exception as error:
            # Each file system has its own errors.
            raise InputError(f"{text}: {_line(error)}") from None
        files = [
            file
            for name, details in sorted(found, key=lambda one: one[0])
            if self._format or _format(name)
            if not _hidden((file := self._file(name, base, details)).name)
        ]
        if not files:
            raise InputError(f"{text}: no file there that ends in one of {', '.join(FORMATS)}")
        return files

    def _resolved(self, found: dict[str, Any], *, deep: bool) -> Iterator[tuple[str, Any]]:
        """Yield the files of a listing and behind its links; if `deep`, also the files in linked folders."""
        for name, details in found.items():
            linked = details["type"] == "other"
            if linked:
                details = self._system.info(name)
            if details["type"] == "directory" and linked and deep:
                yield from self._resolved(self._system.find(name, detail=True), deep=True)
            elif details["type"] not in {"directory", "other"}:
                yield name, details

    def _details(self, path: str) -> Any:
        try:
            return self._system.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _file(self, path: str, base: str, details: Any) -> _File:
        version = next((str(details[key]) for key in VERSIONS if details.get(key)), "")
        name = path.removeprefix(base).lstrip("/")
        return _File(path, name, int(details.get("size") or 0), version)

    def _values(self, file: _File) -> Values:
        format = self._format or _format(file.path) or ""
        compression = COMPRESSED.get(PurePosixPath(file.path).suffix.lower())
        streamed = {"seekable": False} if self._arrow and format != "parquet" else {}
        try:
            stored = self._system.open(file.path, "rb", **streamed)
        except Exception as error:
            # Each file system and each codec has its own errors.
            raise InputError(f"{file.path}: {_line(error)}") from None
        with closing(stored):
            raw = _Guarded(stored, file.path, InputError)
            if format == "parquet":
                if self._separator:
                    raise CorruptError(f"{file.name}: --separator is for CSV, and this is Parquet")
                if compression:
                    raise CorruptError(f"{file.name}: Parquet inside {compression} can't be read: unpack it")
                yield from read_parquet(raw, file.name, self._advance, file.size)
                return
            content: io.RawIOBase = raw
            if compression:
                self._read = None
                content = _Guarded(_decompressed(raw, compression), file.name, CorruptError)
            yield from read_text(
                io.BufferedReader(content, BLOCK), file.name, format, self._separator, self._advance
            )

    def _advance(self, count: float) -> None:
        if self._read is not None:
            self._read += count


class Pipe:
    """A stream that can be read only once, such as standard input.

    Args:
        stream: The stream.
        format: A value of `FORMATS` other than Parquet.
        separator: Separator of the columns of CSV.
        name: Path of a named pipe.
    """

    silent = True

    def __init__(
        self,
        stream: io.BufferedReader,
        format: str,
        separator: str | None = None,
        name: str = "standard input",
    ) -> None:
        if format == "parquet":
            raise InputError(f"{name}: Parquet can't be read from a pipe; name the file")
        self._stream = stream
        self._format = format
        self._separator = separator
        self._name = name
        self._compression = COMPRESSED.get(PurePosixPath(name).suffix.lower())

    def files(self) -> Iterator[tuple[str, Values]]:
        """Yield the rows as they arrive, as one file without a name."""
        yield "", self._values()

    def _values(self) -> Values:
        stream = self._stream
        if self._compression:
            raw = _Guarded(stream, self._name, InputError)
            content = _Guarded(_decompressed(raw, self._compression), self._name, CorruptError)
            stream = io.BufferedReader(content)
        return read_text(stream, self._name, self._format, self._separator, lambda count: None)

    def fingerprint(self) -> JSON:
        """Return the format; the content of a pipe can't be known in advance."""
        return {"pipe": self._format}

    def share_read(self) -> float | None:
        """Return None: the length of a pipe is unknown."""
        return None


# File systems


def _filesystem(text: str) -> tuple[Any, str]:
    """Return fsspec's file system of an input, and the path in it."""
    try:
        import fsspec
        import pyarrow as pa
    except ImportError:
        raise InputError(f"reading files needs {extra('batch')}") from None
    if "://" not in text:
        return fsspec.filesystem("file"), below_home(text).absolute().as_posix()
    scheme = text.partition("://")[0].lower()
    if scheme in ARROW_SCHEMES:
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow.fs import FileSystem

        try:
            # Parsers of URIs refuse pattern characters.
            system, path = FileSystem.from_uri(_escaped(text))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InputError(f"{text}: {_line(error)}") from None
        return ArrowFSWrapper(system, skip_instance_cache=True), _escaped(path, back=True)
    try:
        system, path = fsspec.core.url_to_fs(text)
    except ImportError as error:
        needs = f"this needs {extra('hf')}" if scheme == "hf" else _line(error)
        raise InputError(f"{text}: {needs}") from None
    except Exception as error:
        # Each file system and each codec has its own errors.
        raise InputError(f"{text}: {_line(error)}") from None
    return system, path


def _converted(text: str, filesystems: FileSystems) -> str:
    """Return the folder of a dataset's Parquet files, to which the Hugging Face Hub converts every dataset.

    Args:
        text: hf://OWNER/NAME, hf://OWNER/NAME#SPLIT or hf://OWNER/NAME#CONFIG/SPLIT; the split is "train"
            unless given. hf://datasets/OWNER/NAME/PATH names files of the dataset itself.
        filesystems: The file systems.
    """
    name, _, part = text.removeprefix("hf://").partition("#")
    if name.startswith(("datasets/", "buckets/", "spaces/")):
        return text
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*/[\w.-]*\w[\w.-]*", name):
        raise InputError(
            f"{text}: a dataset of the Hub is hf://OWNER/NAME#CONFIG/SPLIT, its files are "
            "hf://datasets/OWNER/NAME/PATH; a local folder is named without hf://"
        )
    config, _, split = part.rpartition("/")
    split = split or "train"
    root = f"hf://datasets/{name}@refs/convert/parquet"
    files = f"name its files, as in hf://datasets/{name}/PATH"

    def folders(uri: str) -> list[str]:
        system, path = filesystems(uri)
        try:
            found = system.ls(path, detail=True)
        except FileNotFoundError:
            message = f"no such dataset, or the Hub hasn't converted it to Parquet: {files}"
            raise InputError(f"{text}: {message}") from None
        except Exception as error:
            # Each file system and each codec has its own errors.
            raise InputError(f"{text}: {_line(error)}") from None
        return sorted(PurePosixPath(one["name"]).name for one in found if one["type"] == "directory")

    configs = folders(root)
    if not config:
        if len(configs) > 1 and "default" not in configs:
            raise InputError(
                f"{text}: has several configs; name one, as in hf://{name}#{configs[0]}/{split}; there are: "
                + ", ".join(configs)
            )
        config = "default" if "default" in configs else "".join(configs)
    if config not in configs:
        raise InputError(f"{text}: no config {config!r}; there are: {', '.join(configs) or 'none'}")
    splits = folders(f"{root}/{config}")
    if split not in splits:
        if f"partial-{split}" in splits:
            raise InputError(f"{text}: the Hub has converted only a part of this split: {files}")
        raise InputError(f"{text}: no split {split!r}; there are: {', '.join(splits) or 'none'}")
    return f"{root}/{config}/{split}"


def _is_pipe(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def _escaped(uri: str, *, back: bool = False) -> str:
    for plain, escape in (("*", "%2A"), ("[", "%5B"), ("]", "%5D")):
        uri = uri.replace(escape, plain) if back else uri.replace(plain, escape)
    return uri


def _format(path: str) -> str | None:
    parts = PurePosixPath(path)
    if parts.suffix.lower() in COMPRESSED:
        parts = parts.with_suffix("")
    return FORMATS.get(parts.suffix.lower())


def _hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in PurePosixPath(path).parts)


def _fixed_part(pattern: str) -> str:
    """Return the part of a path before the first component with a pattern."""
    parts = pattern.split("/")
    fixed = [index for index, part in enumerate(parts) if set(part) & set("*?[")]
    return "/".join(parts[: fixed[0]]) or "/" if fixed else pattern


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def _line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# Bytes


class _Guarded(io.RawIOBase):
    """A file whose errors are errors of a run.

    Args:
        file: The file.
        name: Its name, for errors.
        error: `InputError` for a storage, which may work again; `CorruptError` for a decompressor.
    """

    def __init__(self, file: Any, name: str, error: type[InputError]) -> None:
        self._file = file
        self._name = name
        self._error = error

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return whether the file can be read from any place."""
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """Return the offset."""
        return int(self._file.tell())

    def read(self, size: int = -1) -> bytes:
        """Read bytes; none at the end."""
        try:
            # `read` of a decompressor would wait for all bytes, while a pipe has only a few.
            decompressed = self._error is CorruptError and size > 0
            found = self._file.read1(size) if decompressed else self._file.read(size)
        except InputError:
            raise
        except Exception as error:
            # Each file system and each codec has its own errors.
            raise self._error(f"{self._name}: {_line(error)}") from None
        return bytes(found)

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; return the number of bytes."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)


def _decompressed(raw: io.RawIOBase, compression: str) -> Any:
    if compression in ARROW_CODECS:
        import pyarrow as pa

        return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)
    from fsspec.compression import compr

    return compr[compression](raw, mode="rb")
