"""Content of files, on a disk."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol
from uuid import uuid4

from serve_app.batches.errors import ContentLostError
from serve_app.batches.failpoints import reach
from serve_app.batches.lines import Input

PIECE_BYTES = 1 << 18
"""Bytes that are read at once."""

NAME = re.compile("[0-9a-f]{32}")
"""Name of a draft."""


class Draft:
    """Content that is being received. It is deleted unless `Content.keep` gives it an id.

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

    def sync(self) -> None:
        """Flush the bytes to the disk, and close the draft."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Delete the draft."""
        self.path.unlink(missing_ok=True)
        # The last bytes may find no space; nobody needs them.
        with suppress(OSError):
            self._file.close()


class Drafts:
    """Folder of the drafts. Those of an earlier process are deleted, and nothing else that is there.

    Args:
        folder: Folder of this folder; it is created if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "drafts"
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            if NAME.fullmatch(path.name):
                path.unlink()

    def new(self) -> Draft:
        """Return a new draft."""
        return Draft(self._folder / uuid4().hex)


FOLDER = "files"
"""The folder of the contents, beside the database."""


class Contents(Protocol):
    """Contents by id, on a disk or elsewhere; see `Content` for its methods."""

    def path(self, id: str) -> Input: ...

    def size(self, id: str) -> int | None: ...

    def draft(self) -> Draft: ...

    def keep(self, draft: Draft, id: str) -> None: ...

    def append(self, id: str, offset: int, data: bytes) -> None: ...

    def seal(self, id: str, size: int) -> None: ...

    def pieces(self, id: str, size: int, start: int = 0) -> Iterator[bytes]: ...

    def spans(self, id: str, places: Sequence[tuple[int, int]]) -> list[bytes]: ...

    def remove(self, id: str) -> None: ...


class Content:
    """Contents by id. Its methods may be called in any thread, but only one at a time for each id.

    Args:
        folder: Folder of the contents; it is created if missing. Drafts of an earlier process are deleted.
    """

    def __init__(self, folder: Path) -> None:
        self._files = folder / FOLDER
        self._files.mkdir(0o700, parents=True, exist_ok=True)
        self._drafts = Drafts(folder)
        _sync(folder)

    def path(self, id: str) -> Path:
        """Return the path of a content."""
        return self._files / id

    def draft(self) -> Draft:
        """Return a new draft."""
        return self._drafts.new()

    def size(self, id: str) -> int | None:
        """Return the length of a content; None: it is missing."""
        try:
            return self.path(id).stat().st_size
        except FileNotFoundError:
            return None

    def keep(self, draft: Draft, id: str) -> None:
        """Make a draft the content of an id, durably: after a crash it is there as a whole, or not at all."""
        reach("content.sync")
        draft.sync()
        reach("content.rename")
        draft.path.replace(self.path(id))
        reach("content.renamed")
        _sync(self._files)
        reach("content.kept")

    def append(self, id: str, offset: int, data: bytes) -> None:
        """Write bytes at an offset, durably, and cut off what was behind it.

        Args:
            id: The content; it is created if missing and the offset is 0.
            offset: The length that is known to be valid.
            data: The bytes.

        Raises:
            ContentLostError: The content is shorter than `offset`.
            OSError: The disk is full, or fails; the bytes before the offset are as they were.
        """
        path = self.path(id)
        reach("content.append")
        if not offset:
            path.touch()
        try:
            file = path.open("r+b")
        except FileNotFoundError:
            raise ContentLostError(f"the content of {id} is gone") from None
        with file:
            if file.seek(0, os.SEEK_END) < offset:
                raise ContentLostError(f"the content of {id} is shorter than it was")
            file.truncate(offset)
            file.seek(offset)
            file.write(data)
            file.flush()
            reach("content.appended")
            os.fsync(file.fileno())
        if not offset:
            # The name of a new file is durable only with its folder.
            _sync(self._files)
        reach("content.synced")

    def seal(self, id: str, size: int) -> None:
        """Cut off what a content has beyond its valid length.

        Raises:
            ContentLostError: The content is shorter than `size`.
        """
        if not size:
            self.path(id).unlink(missing_ok=True)
            return
        self.append(id, size, b"")

    def pieces(self, id: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield the first `size` bytes of a content, without the first `start` ones.

        Raises:
            ContentLostError: The content is missing, or shorter.
        """
        try:
            file = self.path(id).open("rb")
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
        """Return parts of a content, given by their offsets and lengths; behind its end there are no bytes.

        Raises:
            ContentLostError: The content is missing.
        """
        try:
            file = self.path(id).open("rb")
        except FileNotFoundError:
            raise ContentLostError(f"the content of {id} is gone") from None
        with file:
            found = []
            for offset, size in places:
                file.seek(offset)
                found.append(file.read(size))
            return found

    def remove(self, id: str) -> None:
        """Delete a content, if it is there."""
        reach("content.remove")
        self.path(id).unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
