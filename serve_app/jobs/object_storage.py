"""Contents in object storage through fsspec: `s3://`, `gs://` and others."""

import io
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

BLOCK_BYTES = 1 << 20
"""Bytes of a read from the storage."""


class Objects:
    """Objects under a URL; see `serve_app.jobs.content.Storage`.

    Args:
        url: URL of the folder.

    Raises:
        StoreError: The URL can't be used.
    """

    def __init__(self, url: str) -> None:
        try:
            # A cached listing would hide files that another process has written.
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StoreError(f"batches.content: {url}: {error}") from None
        self._root = root.rstrip("/")
        with _translated():
            self._fs.makedirs(self._root, exist_ok=True)

    def path(self, name: str) -> None:
        """Return None: an object has no path on the disk."""

    def open(self, name: str) -> IO[bytes]:
        """Open an object to read."""
        return io.BufferedReader(_Raw(self._open(name)), BLOCK_BYTES)

    def spans(self, name: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return bytes of an object, by offsets and lengths; all ranges are fetched at once."""
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
        paths = [self._path(name) for name in names]
        with _translated():
            try:
                self._fs.rm(paths)
            except FileNotFoundError:
                for path in paths:
                    with suppress(FileNotFoundError):
                        self._fs.rm_file(path)

    def _open(self, name: str) -> Any:
        # With a cache, the file would read ahead, many megabytes in some storages. The file has no `readline`
        # with a size, so `open` buffers it.
        with _translated():
            return self._fs.open(self._path(name), "rb", cache_type="none")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


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
