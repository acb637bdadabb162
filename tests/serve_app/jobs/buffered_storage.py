"""An object storage that is read as `s3fs` and `gcsfs` do it: each read is a request for a range."""

from collections import Counter
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

PROTOCOL = "buffered"


class _File(AbstractBufferedFile):  # type: ignore[misc]
    DEFAULT_BLOCK_SIZE = 50 << 20

    def _fetch_range(self, start: int, end: int) -> bytes:
        if BufferedStorage.fails:
            # Those of botocore and aiohttp are no OSErrors either.
            raise RuntimeError("the storage can't be reached")
        data: bytes = self.fs.store[self.path].getvalue()[start:end]
        BufferedStorage.fetched.append(len(data))
        BufferedStorage.fetched_of[self.path.rpartition("/")[2]] += len(data)
        return data


class BufferedStorage(MemoryFileSystem):  # type: ignore[misc]
    """The storage, in memory.

    Attributes:
        fetched: Lengths of the ranges that were sent.
        fetched_of: Bytes that were sent, by the last part of the path.
        fails: Whether reading fails.
    """

    protocol = PROTOCOL
    fetched: ClassVar[list[int]] = []
    fetched_of: ClassVar[Counter[str]] = Counter()
    fails = False

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return MemoryFileSystem._strip_protocol(path.replace(f"{PROTOCOL}://", "memory://"))

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if mode != "rb":
            return super()._open(path, mode, block_size, **options)
        return _File(self, path, mode, block_size, **options)


fsspec.register_implementation(PROTOCOL, BufferedStorage, clobber=True)
