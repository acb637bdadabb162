"""Contents of files: uploads as they came, and results that are appended in parts.

A complete content is one file, `files/ID`, and never changes. Results that are still written are parts in the
folder `parts/ID`. The name of a part contains the epoch of its writer (see `Store`) and the offset of its
first byte:

- An append writes a new part. Nothing is truncated.
- Until the content is complete, a process writes, merges and deletes parts of its own epoch only: a process
  that was taken over without noticing it destroys nothing.
- If two parts contain the same byte, the part with the higher epoch is right. A process begins at the
  committed length, and once it has begun, no older process commits. So a part of a lower epoch is right up to
  the first byte of a part of a higher epoch, and wrong after it.
- `files/ID` wins over all parts: it is made of the committed parts when no more can be committed; then the
  parts are deleted.

Disks and object storage follow the same rules; a `Storage` hides their differences.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Generic, Literal, NamedTuple, Protocol, TypeVar
from uuid import uuid4

from serve_app.jobs.errors import ContentLostError
from serve_app.jobs.failpoints import reach
from serve_app.system.disk import sync

PIECE_BYTES = 1 << 18
"""Bytes that are read at once."""

PART_BYTES = 16 << 20
"""Bytes from which a part is not merged any more."""

MERGED_PARTS = 16
"""Parts that are merged into one; the same number of merged parts forms the next larger part."""

FOLDER = "files"
"""The folder of the contents, beside the database."""

DRAFT = re.compile(r"(\d+)-[0-9a-f]{32}")
"""Name of a draft: the epoch of its writer, and a random number."""

PART = re.compile(r"(\d+)-(\d{20})")
"""Name of a part: the epoch of its writer, and its offset."""


class Input(Protocol):
    """A file that can be read: a path, or an object in a storage."""

    @property
    def name(self) -> str: ...

    def open(self, mode: Literal["rb"]) -> IO[bytes]: ...


class Draft:
    """Content that is being received or made. It is deleted unless a `Storage` keeps it.

    Attributes:
        size: Bytes so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file: IO[bytes] = path.open("xb")

    def write(self, data: bytes) -> None:
        """Add bytes."""
        self._file.write(data)
        self.size += len(data)

    def close(self) -> None:
        """Close the draft for writing."""
        self._file.close()

    def sync(self) -> None:
        """Flush the bytes to the disk, and close the draft."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Delete the draft."""
        self.path.unlink(missing_ok=True)
        # The last bytes may find no space; they aren't needed.
        with suppress(OSError):
            self._file.close()


I_co = TypeVar("I_co", bound=Input, covariant=True)


class Storage(Protocol[I_co]):
    """Files by name, such as `files/ID`, on a disk or elsewhere. All errors are OSErrors."""

    def input(self, name: str) -> I_co:
        """Return a complete file, to read some of its lines at a time."""

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read; raise a FileNotFoundError if it is missing."""

    def spans(self, name: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return bytes of a file, by offsets and lengths; raise a FileNotFoundError if it is missing."""

    def size(self, name: str) -> int | None:
        """Return the length of a file; None: it is missing."""

    def list(self, folder: str) -> dict[str, int]:
        """Return the names in a folder, relative to the folder, with their lengths."""

    def put(self, draft: Draft, name: str) -> None:
        """Make a draft a file, durably, in place of an older file: after a crash, one of them is whole."""

    def remove(self, names: Sequence[str]) -> None:
        """Delete the files that exist."""

    def remove_folder(self, folder: str) -> None:
        """Delete a folder with all of its files, if it exists."""


class DiskContent:
    """Files in a folder.

    Args:
        folder: The folder; it is created if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in (FOLDER, "parts"):
            (folder / name).mkdir(0o700, parents=True, exist_ok=True)
        sync(folder)

    def input(self, name: str) -> Path:
        """Return the path of a file."""
        return self._folder / name

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read."""
        return self.input(name).open("rb")

    def spans(self, name: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return bytes of a file, by offsets and lengths; reads stop at its end."""
        found = []
        with self.open(name) as file:
            for offset, size in places:
                file.seek(offset)
                found.append(file.read(size))
        return found

    def size(self, name: str) -> int | None:
        """Return the length of a file; None: it is missing."""
        try:
            return self.input(name).stat().st_size
        except FileNotFoundError:
            return None

    def list(self, folder: str) -> dict[str, int]:
        """Return the names in a folder with their lengths."""
        found = {}
        with suppress(FileNotFoundError):
            for name in os.listdir(self.input(folder)):
                if (size := self.size(f"{folder}/{name}")) is not None:
                    found[name] = size
        return found

    def put(self, draft: Draft, name: str) -> None:
        """Make a draft a file, durably."""
        reach("content.sync")
        draft.sync()
        reach("content.rename")
        self._move(draft.path, name)
        reach("content.kept")

    def remove(self, names: Sequence[str]) -> None:
        """Delete the files that exist, and folders that become empty."""
        for name in names:
            self.input(name).unlink(missing_ok=True)
        for folder in {self.input(name).parent for name in names} - {self._folder / FOLDER}:
            # Other files are still in the folder, or another process was faster.
            with suppress(OSError):
                folder.rmdir()

    def remove_folder(self, folder: str) -> None:
        """Delete a folder with all of its files, if it exists."""
        self.remove([f"{folder}/{name}" for name in self.list(folder)])
        # `remove` leaves a folder that had no files, and another process may write to the folder.
        with suppress(OSError):
            self.input(folder).rmdir()

    def _move(self, path: Path, name: str) -> None:
        to = self.input(name)
        if not to.parent.exists():
            to.parent.mkdir(0o700, exist_ok=True)
            sync(to.parent.parent)
        path.replace(to)
        reach("content.renamed")
        sync(to.parent)


class ContentPart(NamedTuple):
    """A part of a content.

    Attributes:
        epoch: Epoch of its writer.
        start: Offset of its first byte.
        end: Offset after its last byte.
        name: Name in the storage.
        merged: Number of times it was merged; None: it is large enough.
    """

    epoch: int
    start: int
    end: int
    name: str
    merged: int | None = 0


class Content(Generic[I_co]):
    """Contents by id. Its methods may be called in any thread, but only one at a time for each id.

    Args:
        folder: Folder of the drafts; drafts of earlier epochs are deleted.
        epoch: The epoch of the owner, `Store.epoch`.
        storage: Where the contents are; a `DiskContent` uses the same folder.
        part_bytes: Bytes from which a part is not merged any more.
        merged_parts: Parts that are merged into one.
    """

    def __init__(
        self,
        folder: Path,
        epoch: int,
        storage: Storage[I_co],
        *,
        part_bytes: int = PART_BYTES,
        merged_parts: int = MERGED_PARTS,
    ) -> None:
        self._epoch = epoch
        self._storage = storage
        self._part_bytes = part_bytes
        self._merged_parts = merged_parts
        # Consecutive parts of this process, by content.
        self._own: dict[str, list[ContentPart]] = {}
        self._drafts = folder / "drafts"
        self._drafts.mkdir(0o700, parents=True, exist_ok=True)
        for path in self._drafts.iterdir():
            if (found := DRAFT.fullmatch(path.name)) and int(found[1]) < epoch:
                path.unlink(missing_ok=True)

    def path(self, id: str) -> I_co:
        """Return a complete content, to be read."""
        return self._storage.input(_whole(id))

    def size(self, id: str) -> int | None:
        """Return the length of a complete content; None: it is missing or incomplete."""
        return self._storage.size(_whole(id))

    def draft(self) -> Draft:
        """Return a new draft."""
        return Draft(self._drafts / f"{self._epoch}-{uuid4().hex}")

    def keep(self, draft: Draft, id: str) -> None:
        """Make a draft the content of an id, durably: after a crash it exists as a whole, or not at all."""
        self._storage.put(draft, _whole(id))

    def append(self, id: str, offset: int, data: bytes) -> None:
        """Write results at an offset, durably. They replace what this process wrote from the offset on.

        Args:
            id: The content.
            offset: The committed length.
            data: The bytes.

        Raises:
            ContentLostError: The content is shorter than `offset`.
            OSError: The storage is full, or fails; the bytes before the offset are as they were.
        """
        reach("content.append")
        own = self._own.get(id)
        if own is None:
            if self.size(id) is not None:
                raise ContentLostError(f"the content of {id} is complete already")
            _right_parts(id, self._parts(id), 0, offset)
            own = self._own[id] = []
        while own and own[-1].end > offset:
            own.pop()
        if own and own[-1].end < offset:
            own.clear()
        self._merge(id, own)
        part = ContentPart(self._epoch, offset, offset + len(data), self._part(id, offset))
        draft = self.draft()
        try:
            draft.write(data)
            reach("content.appended")
            self._storage.put(draft, part.name)
        finally:
            draft.discard()
        own.append(part)
        reach("content.synced")

    def take_back(self, id: str, offset: int) -> None:
        """Delete the uncommitted part at an offset that this process appended last."""
        self._own.pop(id, None)
        self._storage.remove([self._part(id, offset)])

    def seal(self, id: str, size: int) -> None:
        """Complete a content whose committed length remains `size`.

        Raises:
            ContentLostError: The content is shorter than `size`.
        """
        if not size:
            self.remove(id)
            return
        if self.size(id) != size:
            draft = self.draft()
            try:
                for piece in self.pieces(id, size):
                    draft.write(piece)
                self.keep(draft, id)
            finally:
                draft.discard()
        self._remove_parts(id)

    def pieces(self, id: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes of a content from `start` to `size`.

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
                # Parts may be merged while they are read. The parts that are found now have the same bytes.
                if start == tried:
                    raise ContentLostError(f"the content of {id} is gone, or shorter than it was") from error
                tried = start

    def spans(self, id: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return bytes of a complete content, by offsets and lengths; reads stop at its end.

        Raises:
            ContentLostError: The content is missing.
        """
        try:
            return self._storage.spans(_whole(id), places)
        except FileNotFoundError:
            raise ContentLostError(f"the content of {id} is gone") from None

    def remove(self, id: str) -> None:
        """Delete a content, if it exists."""
        reach("content.remove")
        self._storage.remove([_whole(id)])
        self._remove_parts(id)

    def _pieces(self, id: str, size: int, start: int) -> Iterator[bytes]:
        if self.size(id) is not None:
            yield from self._read(id, _whole(id), start, size)
            return
        for part, at, end in _right_parts(id, self._parts(id), start, size):
            yield from self._read(id, part.name, at - part.start, end - part.start)

    def _read(self, id: str, name: str, start: int, end: int) -> Iterator[bytes]:
        with self._storage.open(name) as file:
            file.seek(start)
            while start < end:
                piece = file.read(min(PIECE_BYTES, end - start))
                if not piece:
                    raise ContentLostError(f"the content of {id} is shorter than it was")
                start += len(piece)
                yield piece

    def _merge(self, id: str, own: list[ContentPart]) -> None:
        """Merge the last parts if enough of them were merged equally often. All of them are committed.

        The merged part replaces the first part, which has the same first bytes. The remaining parts are
        deleted afterwards, and do no harm if that fails.
        """
        while len(last := own[-self._merged_parts :]) == self._merged_parts:
            merged = last[0].merged
            if merged is None or any(part.merged != merged for part in last):
                return
            draft = self.draft()
            try:
                for part in last:
                    for piece in self._read(id, part.name, 0, part.end - part.start):
                        draft.write(piece)
                self._storage.put(draft, last[0].name)
            except FileNotFoundError:
                raise ContentLostError(f"the content of {id} is gone, or shorter than it was") from None
            finally:
                draft.discard()
            reach("content.merged")
            level = merged + 1 if draft.size < self._part_bytes else None
            own[-self._merged_parts :] = [last[0]._replace(end=last[-1].end, merged=level)]
            self._storage.remove([part.name for part in last[1:]])

    def _parts(self, id: str) -> list[ContentPart]:
        parts = []
        for file, size in self._storage.list(f"parts/{id}").items():
            if found := PART.fullmatch(file):
                epoch, start = int(found[1]), int(found[2])
                parts.append(ContentPart(epoch, start, start + size, f"parts/{id}/{file}"))
        return parts

    def _remove_parts(self, id: str) -> None:
        self._own.pop(id, None)
        self._storage.remove_folder(f"parts/{id}")

    def _part(self, id: str, start: int) -> str:
        return f"parts/{id}/{self._epoch}-{start:020d}"


Contents = Content[Input]
"""Contents by id, on a disk or elsewhere."""


def _whole(id: str) -> str:
    return f"{FOLDER}/{id}"


def _right_parts(
    id: str, parts: Sequence[ContentPart], start: int, end: int
) -> list[tuple[ContentPart, int, int]]:
    """Return the parts that have the bytes from `start` to `end`, each with the range to read from it.

    Raises:
        ContentLostError: Some bytes are in no part.
    """
    found = []
    while start < end:
        covering = [part for part in parts if part.start <= start < part.end]
        if not covering:
            raise ContentLostError(f"the content of {id} is gone, or shorter than it was")
        # The highest epoch, and in this epoch the last part.
        best = max(covering, key=_rank)
        later = [part.start for part in parts if _rank(part) > _rank(best) and part.start > start]
        until = min(end, best.end, *later)
        found.append((best, start, until))
        start = until
    return found


def _rank(part: ContentPart) -> tuple[int, int]:
    return part.epoch, part.start
