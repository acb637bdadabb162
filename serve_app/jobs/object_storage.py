"""Contents in object storage through fsspec: `s3://`, `gs://` and others."""

import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from serve_app.jobs.content import Draft
from serve_app.jobs.errors import StoreError
from serve_app.jobs.failpoints import reach
from serve_app.system.distribution import extra

try:
    import fsspec
except ImportError:
    raise StoreError(f"batches.content in object storage needs {extra('storage')}") from None

FIRST_BYTES = 1 << 13
"""Bytes of the first read from the storage at a new place."""

BLOCK_BYTES = 1 << 20
"""Most bytes of a read from the storage."""

WINDOWS = 32
"""Number of inputs whose last-read bytes are kept."""


class Objects:
    """Objects under a URL; see `serve_app.jobs.content.Storage`.

    Args:
        url: URL of the folder.

    Raises:
        StoreError: The URL can't be used.
    """

    def __init__(self, url: str) -> None:
        try:
            # Another process may have written meanwhile.
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StoreError(f"batches.content: {url}: {error}") from None
        self._root = root.rstrip("/")
        self._windows: OrderedDict[str, _Window] = OrderedDict()
        self._lock = threading.Lock()
        with _translated():
            self._fs.makedirs(self._root, exist_ok=True)

    def input(self, name: str) -> "ObjectInput":
        """Return an object that never changes."""
        return ObjectInput(self, name)

    def open(self, name: str) -> IO[bytes]:
        """Open an object to read."""
        return io.BufferedReader(_Raw(self._open(name)), BLOCK_BYTES)

    def spans(self, name: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return bytes of an object, by offsets and lengths; all of them are fetched at once."""
        starts, ends = [at for at, _ in places], [at + size for at, size in places]
        with _translated():
            return [*self._fs.cat_ranges([self._path(name)] * len(places), starts, ends, on_error="raise")]

    def size(self, name: str) -> int | None:
        """Return the length of an object; None: it is missing."""
        with _translated():
            try:
                return int(self._fs.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    def put(self, draft: Draft, name: str) -> None:
        """Make a draft an object; the draft is deleted."""
        draft.close()
        reach("content.rename")
        with _translated():
            self._fs.put_file(str(draft.path), self._path(name))
        reach("content.kept")
        draft.discard()

    def remove(self, names: Sequence[str]) -> None:
        """Delete the objects that exist."""
        for name in names:
            with self._lock:
                self._windows.pop(name, None)
        paths = [self._path(name) for name in names]
        with _translated():
            try:
                self._fs.rm(paths)
            except FileNotFoundError:
                for path in paths:
                    with suppress(FileNotFoundError):
                        self._fs.rm_file(path)

    def window(self, name: str) -> "_Window":
        """Return the window of an object; raise a FileNotFoundError if the object is missing."""
        with self._lock:
            if (found := self._windows.get(name)) is not None:
                self._windows.move_to_end(name)
                return found
        found = _Window(self._open(name))
        with self._lock:
            self._windows[name] = found
            while len(self._windows) > WINDOWS:
                self._windows.popitem(last=False)
        return found

    def _open(self, name: str) -> Any:
        # With a cache, the file would read ahead, many megabytes in some storages. It has no `readline` with
        # a size, so callers buffer it.
        with _translated():
            return self._fs.open(self._path(name), "rb", cache_type="none")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class ObjectInput:
    """An object that never changes, with the part of the interface of `Path` that reading lines needs.

    It is opened for some lines at a time. Bytes fetched beyond them are kept for the next read.
    """

    def __init__(self, objects: Objects, path: str) -> None:
        self._objects = objects
        self._path = path
        self.name = path.rpartition("/")[2]

    def open(self, mode: str) -> IO[bytes]:
        """Open the object to read."""
        return io.BufferedReader(_WindowReader(self._objects.window(self._path)), FIRST_BYTES)


class _Window:
    """The bytes that were read last from an object.

    Sequential reads fetch twice as many bytes each time, up to a block; a read at another place starts with
    few bytes. So an input that is read in order is fetched once, and scattered reads don't fetch the whole
    input for each line.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._start = 0
        self._data = b""
        self._size = FIRST_BYTES // 2

    def read(self, start: int, most: int) -> bytes:
        """Return some bytes from an offset on; empty: the end."""
        with self._lock:
            at = start - self._start
            if not 0 <= at < len(self._data):
                goes_on = at == len(self._data)
                self._size = min(2 * self._size, BLOCK_BYTES) if goes_on else FIRST_BYTES
                with _translated():
                    self._file.seek(start)
                    data = self._file.read(max(self._size, most))
                # A reader may stop before the end of the fetched bytes, and the next reader begins there.
                kept = self._data[-FIRST_BYTES:] if goes_on else b""
                self._start, self._data, at = start - len(kept), kept + data, len(kept)
            return self._data[at : at + most]


class _WindowReader(io.RawIOBase):
    """An object that is read through its window."""

    def __init__(self, window: _Window) -> None:
        self._window = window
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence not in (io.SEEK_SET, io.SEEK_CUR):
            raise io.UnsupportedOperation("an object isn't read from its end")
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        piece = self._window.read(self._at, len(buffer))
        self._at += len(piece)
        buffer[: len(piece)] = piece
        return len(piece)


class _Raw(io.RawIOBase):
    """An open object whose errors are OSErrors."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        with _translated():
            piece = self._file.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def _translated() -> Iterator[None]:
    """Turn every error into an OSError: each storage has its own kinds of errors."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
