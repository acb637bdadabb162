"""Content of files, in object storage through fsspec: `s3://`, `gs://` and others.

An object is written as a whole, and can't be appended to. So results are parts: objects of their own, each
under the offset at which it begins. Small parts are merged from time to time, and all of them become one
object when the batch has ended.
"""

import io
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from serve_app.batches.content import PIECE_BYTES, Draft, Drafts
from serve_app.batches.errors import ContentLostError, StoreError
from serve_app.batches.failpoints import reach

try:
    import fsspec
except ImportError:
    raise StoreError(
        "batches.content in object storage needs fsspec: pip install 'saturate[storage]', and s3fs for "
        "s3://, gcsfs for gs://"
    ) from None


BLOCK_BYTES = 1 << 20
"""Bytes that are asked of the storage at once."""

PART_BYTES = 16 << 20
"""Bytes from which on a part is not merged any more."""

MOST_SMALL_PARTS = 64
"""Smaller parts at the end of a content, which are merged when there are so many."""


class ObjectFile:
    """An object, with the part of the interface of `Path` that reading takes."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self.name = path.rpartition("/")[2]

    def open(self, mode: str) -> IO[bytes]:
        """Open it to read."""
        # The file reads ahead, many megabytes in some storages, and has no `readline` of a size.
        with _translated():
            file = self._fs.open(self._path, mode, cache_type="none")
        return io.BufferedReader(_Raw(file), BLOCK_BYTES)


class _Raw(io.RawIOBase):
    """An object that is open, whose errors are OSErrors."""

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


class ObjectContent:
    """Contents by id, in object storage; see `serve_app.batches.content.Content`.

    Args:
        url: Where they are.
        folder: Folder for uploads that are being received.

    Raises:
        StoreError: The URL can't be used.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._drafts = Drafts(folder)
        try:
            # Another process may have written meanwhile.
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StoreError(f"batches.content: {url}: {error}") from None
        root = root.rstrip("/")
        self._files, self._parts = f"{root}/files", f"{root}/parts"
        # Lengths of the parts by their offsets, of the contents that this process appends to: no other does.
        self._known: dict[str, dict[int, int]] = {}
        with _translated():
            self._fs.makedirs(root, exist_ok=True)

    def path(self, id: str) -> ObjectFile:
        """Return the object of a content that is complete."""
        return ObjectFile(self._fs, self._file(id))

    def size(self, id: str) -> int | None:
        """Return the length of a content that is complete; None: it is missing."""
        with _translated():
            try:
                return int(self._fs.info(self._file(id))["size"])
            except FileNotFoundError:
                return None

    def draft(self) -> Draft:
        """Return a new draft."""
        return self._drafts.new()

    def keep(self, draft: Draft, id: str) -> None:
        """Make a draft the content of an id: afterwards it is there as a whole, or not at all."""
        reach("content.sync")
        draft.sync()
        reach("content.rename")
        with _translated():
            self._fs.put_file(str(draft.path), self._file(id))
        reach("content.kept")
        draft.discard()

    def append(self, id: str, offset: int, data: bytes) -> None:
        """Write bytes at an offset; what was behind it counts no more.

        Raises:
            ContentLostError: The content is shorter than `offset`.
            OSError: The storage fails.
        """
        reach("content.append")
        parts = self._sizes(id)
        chain = _chain(id, parts, offset)
        # After an error they have to be looked for.
        self._known.pop(id, None)
        with _translated():
            self._remove(id, parts, [start for start in parts if start > offset])
            if chain and chain[-1] + parts[chain[-1]] > offset:
                # A part has more than is committed, as beside a database that was restored.
                last = chain.pop()
                data = self._fs.cat_file(self._part(id, last), end=offset - last) + data
                offset = last
            self._merge(id, parts, chain)
            self._fs.pipe_file(self._part(id, offset), data)
        parts[offset] = len(data)
        self._known[id] = parts
        reach("content.synced")

    def seal(self, id: str, size: int) -> None:
        """Make one object of a content of this length, which nothing is appended to any more.

        Raises:
            ContentLostError: The content is shorter than `size`.
        """
        if not size:
            self.remove(id)
            return
        if self.size(id) != size:
            draft = self.draft()
            try:
                for piece in self._joined(id, size):
                    draft.write(piece)
                self.keep(draft, id)
            finally:
                draft.discard()
        self._remove_parts(id)

    def pieces(self, id: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield the first `size` bytes of a content, without the first `start` ones.

        Raises:
            ContentLostError: The content is missing, or shorter.
        """
        tried = -1
        while start < size:
            try:
                for piece in self._pieces(id, size, start):
                    start += len(piece)
                    yield piece
            except (FileNotFoundError, ContentLostError) as error:
                # Parts are merged while they are read. Those that are found now have the same bytes.
                if start == tried:
                    raise ContentLostError(f"the content of {id} is gone, or shorter than it was") from error
                tried = start

    def spans(self, id: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return parts of a content that is complete, which are asked for at once.

        Args:
            id: The content.
            places: Their offsets and lengths; behind the end of the content there are no bytes.

        Raises:
            ContentLostError: The content is missing.
        """
        paths = [self._file(id)] * len(places)
        starts, ends = [at for at, _ in places], [at + size for at, size in places]
        with _translated():
            try:
                return [*self._fs.cat_ranges(paths, starts, ends, on_error="raise")]
            except FileNotFoundError:
                raise ContentLostError(f"the content of {id} is gone") from None

    def remove(self, id: str) -> None:
        """Delete a content, if it is there."""
        reach("content.remove")
        with _translated():
            if self._fs.exists(self._file(id)):
                self._fs.rm_file(self._file(id))
        self._remove_parts(id)

    def _pieces(self, id: str, size: int, start: int) -> Iterator[bytes]:
        if self.size(id) is None:
            yield from self._joined(id, size, start)
            return
        with self.path(id).open("rb") as file:
            yield from _read(id, file, size, start)

    def _joined(self, id: str, size: int, start: int = 0) -> Iterator[bytes]:
        # A copy: a thread may append meanwhile.
        parts = dict(self._sizes(id))
        for at in _chain(id, parts, size):
            length = min(parts[at], size - at)
            if at + length <= start:
                continue
            with ObjectFile(self._fs, self._part(id, at)).open("rb") as file:
                yield from _read(id, file, length, max(0, start - at))

    def _merge(self, id: str, parts: dict[int, int], chain: list[int]) -> None:
        """Make one part of the small ones at the end of a chain, if they are many or large enough together.

        Args:
            id: The content.
            parts: The lengths of its parts by their offsets, which are changed.
            chain: The offsets of those whose results are committed: nothing is written between them any more.
        """
        small = [*itertools.takewhile(lambda start: parts[start] < PART_BYTES, reversed(chain))][::-1]
        sizes = [parts[start] for start in small]
        if len(small) < 2 or (len(small) < MOST_SMALL_PARTS and sum(sizes) < PART_BYTES):
            return
        paths = [self._part(id, start) for start in small]
        pieces = self._fs.cat_ranges(paths, [0] * len(sizes), sizes, on_error="raise")
        if [*map(len, pieces)] != sizes:
            raise ContentLostError(f"the content of {id} is shorter than it was")
        # It takes the place of the first one at once. The others are skipped from then on.
        self._fs.pipe_file(paths[0], b"".join(pieces))
        reach("content.merged")
        parts[small[0]] = sum(sizes)
        self._remove(id, parts, small[1:])

    def _remove(self, id: str, parts: dict[int, int], starts: list[int]) -> None:
        if starts:
            self._fs.rm([self._part(id, start) for start in starts])
        for start in starts:
            del parts[start]

    def _remove_parts(self, id: str) -> None:
        self._known.pop(id, None)
        parts = self._sizes(id)
        with _translated():
            self._remove(id, parts, [*parts])

    def _sizes(self, id: str) -> dict[int, int]:
        """Return the lengths of the parts of a content by their offsets."""
        if (known := self._known.get(id)) is not None:
            return known
        with _translated():
            try:
                found = self._fs.ls(f"{self._parts}/{id}", detail=True, refresh=True)
            except FileNotFoundError:
                return {}
        return {int(one["name"].rpartition("/")[2]): one["size"] for one in found if one["type"] == "file"}

    def _file(self, id: str) -> str:
        return f"{self._files}/{id}"

    def _part(self, id: str, start: int) -> str:
        return f"{self._parts}/{id}/{start:020d}"


def _chain(id: str, parts: dict[int, int], size: int) -> list[int]:
    """Return the offsets of the parts that make the first `size` bytes.

    Raises:
        ContentLostError: One is missing.
    """
    chain = []
    at = 0
    while at < size:
        if not parts.get(at):
            raise ContentLostError(f"the content of {id} is shorter than it was")
        chain.append(at)
        at += parts[at]
    return chain


def _read(id: str, file: IO[bytes], size: int, start: int) -> Iterator[bytes]:
    file.seek(start)
    while start < size:
        piece = file.read(min(PIECE_BYTES, size - start))
        if not piece:
            raise ContentLostError(f"the content of {id} is shorter than it was")
        start += len(piece)
        yield piece


@contextmanager
def _translated() -> Iterator[None]:
    """Make an OSError of every error: each storage has kinds of its own."""
    try:
        yield
    except (OSError, ContentLostError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
