"""Bytes of an input file: broken content is told from a disk or a network that fails."""

import io
from collections.abc import Callable
from typing import Any

from serve_app.driver.errors import InputError

BLOCK = 1 << 20
READ_BYTES = 1 << 16
"""Bytes that are decompressed at a time."""


class CorruptError(InputError):
    """The content of a file is broken from some place on; another read of it would fail in the same way."""


class RawFile(io.RawIOBase):
    """A file as it is stored. An error of the storage is an `InputError`, which ends the run.

    Args:
        file: A `pyarrow.NativeFile`.
        path: Path of the file, for errors.
    """

    def __init__(self, file: Any, path: str) -> None:
        self._file = file
        self._path = path

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return whether the file can be read from any place."""
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """Return the place."""
        return int(self._file.tell())

    def read(self, size: int = -1) -> bytes:
        """Read bytes; none at the end."""
        try:
            found: bytes = self._file.read(None if size < 0 else size)
        except OSError as error:
            raise InputError(f"{self._path}: {error}") from None
        return found

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; return the number of bytes."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)


class Decompressed(io.RawIOBase):
    """The content of a compressed file, up to the byte at which it is broken.

    Args:
        begin: Opens the compressed stream from its beginning.
        compression: Name of the compression, as pyarrow has it.
        name: Name of the file, for errors.
    """

    def __init__(self, begin: Callable[[], RawFile], compression: str, name: str) -> None:
        self._begin = begin
        self._compression = compression
        self._name = name
        self._stream = self._open()
        self._done = 0
        self._broken = ""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; return the number of bytes.

        Raises:
            CorruptError: The content is broken at this place.
        """
        if self._broken:
            raise CorruptError(self._broken)
        size = min(len(buffer), READ_BYTES)
        try:
            found = self._stream.read(size)
        except OSError as error:
            found = self._last(size, error)
        buffer[: len(found)] = found
        self._done += len(found)
        return len(found)

    def _open(self) -> Any:
        import pyarrow as pa

        return pa.CompressedInputStream(pa.PythonFile(self._begin(), mode="r"), self._compression)

    def _last(self, size: int, error: OSError) -> bytes:
        """Return the last bytes before the broken place.

        The read that failed has dropped them. So the stream is read again up to there, and then by bytes.
        """
        self._broken = f"{self._name}: {error}"
        stream = self._open()
        left = self._done
        while left:
            left -= len(stream.read(min(left, BLOCK)))
        found = bytearray()
        try:
            while len(found) < size and (byte := stream.read(1)):
                found += byte
        except OSError:
            pass
        if not found:
            raise CorruptError(self._broken)
        return bytes(found)
