"""Contents of files by id: uploads, and the outputs of batches. A content is written once, as a whole.

Disks and object storage follow the same rules; a `Storage` hides their differences.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Generic, Protocol, TypeVar
from uuid import uuid4

from serve_app.jobs.errors import ContentLostError
from serve_app.jobs.failpoints import reach
from serve_app.system.disk import sync

PIECE_BYTES = 1 << 18
"""Bytes that are read at once."""

FOLDER = "files"
"""The folder of the contents, beside the database."""

DRAFT = re.compile(r"(\d+)-[0-9a-f]{32}")
"""Name of a draft: the epoch of its writer, and a random number."""


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

    def open(self) -> IO[bytes]:
        """Open the draft to read its bytes so far."""
        self._file.flush()
        return self.path.open("rb")

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
        # The last bytes aren't needed, and may find no space.
        with suppress(OSError):
            self._file.close()


P_co = TypeVar("P_co", bound=Path | None, covariant=True)


class Storage(Protocol[P_co]):
    """Files by name, such as `files/ID`, on a disk or elsewhere. All errors are OSErrors."""

    def path(self, name: str) -> P_co:
        """Return the path of a file; None: the files are elsewhere."""

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read; raise a FileNotFoundError if it is missing."""

    def spans(self, name: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return bytes of a file, by offsets and lengths; raise a FileNotFoundError if it is missing."""

    def size(self, name: str) -> int | None:
        """Return the length of a file; None: it is missing."""

    def put(self, draft: Draft, name: str) -> None:
        """Make a draft a file, durably, in place of an older file: a crash leaves one of both whole."""

    def remove(self, names: Sequence[str]) -> None:
        """Delete the files that exist."""


class DiskContent:
    """Files in a folder.

    Args:
        folder: The folder; it is created if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / FOLDER).mkdir(0o700, parents=True, exist_ok=True)
        sync(folder)

    def path(self, name: str) -> Path:
        """Return the path of a file."""
        return self._folder / name

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read."""
        return self.path(name).open("rb")

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
            return self.path(name).stat().st_size
        except FileNotFoundError:
            return None

    def put(self, draft: Draft, name: str) -> None:
        """Make a draft a file, durably."""
        reach("content.sync")
        draft.sync()
        reach("content.rename")
        to = self.path(name)
        draft.path.replace(to)
        reach("content.renamed")
        sync(to.parent)
        reach("content.kept")

    def remove(self, names: Sequence[str]) -> None:
        """Delete the files that exist."""
        for name in names:
            self.path(name).unlink(missing_ok=True)


class Content(Generic[P_co]):
    """Contents by id. Its methods may be called in any thread.

    Args:
        folder: Folder that has the drafts, in `drafts`; drafts of earlier epochs are deleted.
        epoch: The epoch of the owner, `Store.epoch`.
        storage: Where the contents are; a `DiskContent` uses the same folder.
    """

    def __init__(self, folder: Path, epoch: int, storage: Storage[P_co]) -> None:
        self._epoch = epoch
        self._storage = storage
        self._drafts = folder / "drafts"
        self._drafts.mkdir(0o700, parents=True, exist_ok=True)
        for path in self._drafts.iterdir():
            if (found := DRAFT.fullmatch(path.name)) and int(found[1]) < epoch:
                path.unlink(missing_ok=True)

    def path(self, id: str) -> P_co:
        """Return the path of a content; None: it is not on a disk."""
        return self._storage.path(_whole(id))

    def size(self, id: str) -> int | None:
        """Return the length of a content; None: it is missing."""
        return self._storage.size(_whole(id))

    def draft(self) -> Draft:
        """Return a new draft."""
        return Draft(self._drafts / f"{self._epoch}-{uuid4().hex}")

    def keep(self, draft: Draft, id: str) -> None:
        """Make a draft the content of an id, durably: after a crash it exists as a whole, or not at all."""
        self._storage.put(draft, _whole(id))

    def pieces(self, id: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes of a content from `start` to `size`.

        Raises:
            ContentLostError: The content is missing, or shorter.
        """
        try:
            file = self._storage.open(_whole(id))
        except FileNotFoundError:
            raise ContentLostError(f"the content of {id} is gone") from None
        with file:
            file.seek(start)
            while start < size:
                piece = file.read(min(PIECE_BYTES, size - start))
                if not piece:
                    raise ContentLostError(f"the content of {id} is shorter than it was")
                start += len(piece)
                yield piece

    def spans(self, id: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return bytes of a content, by offsets and lengths; reads stop at its end.

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


Contents = Content[Path | None]
"""Contents by id, on a disk or elsewhere."""


def _whole(id: str) -> str:
    return f"{FOLDER}/{id}"
