"""The adapters that were loaded while the service runs, kept in a folder that all processes share.

An adapter is a file of its own, which is written or removed as a whole: no process has to be the only one
that writes, and any may end at any moment.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote
from uuid import uuid4

from pydantic import ValidationError

from serve_app.settings.adapters import AdapterSettings

ENDING = ".json"

MAX_ADAPTERS = 1_000
"""Most adapters of a model."""


class FolderError(Exception):
    """The folder can't be used."""


class _Files(Protocol):
    """Small files of one directory; the methods raise the errors of their storage."""

    def read(self) -> Iterator[bytes]:
        """Yield the contents of all files."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file as a whole."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


class _Directory:
    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Iterator[bytes]:
        for path in sorted(self._path.glob(f"*{ENDING}")):
            # Another process may remove one meanwhile.
            with suppress(FileNotFoundError):
                yield path.read_bytes()

    def write(self, name: str, data: bytes) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        draft = self._path / f".{uuid4().hex}"
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path / name)
        finally:
            draft.unlink(missing_ok=True)
        self._sync()

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)
        self._sync()

    def _sync(self) -> None:
        """Put the names of the files on the disk too."""
        with suppress(FileNotFoundError):
            folder = os.open(self._path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


class _Objects:
    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs

            found: tuple[Any, str] = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            needs = "pip install 'saturate[storage]', and s3fs for s3://, gcsfs for gs://"
            raise FolderError(f"adapters_folder: {url}: {error}; {needs}") from None
        self._fs, self._root = found

    def read(self) -> Iterator[bytes]:
        self._fs.invalidate_cache()
        for path in sorted(self._fs.glob(f"{self._root}/*{ENDING}")):
            with suppress(FileNotFoundError):
                yield self._fs.cat_file(path)

    def write(self, name: str, data: bytes) -> None:
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(f"{self._root}/{name}", data)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")


class AdapterFolder:
    """The adapters of one model in a folder. The methods take a while, and belong in a thread.

    Args:
        place: The folder, or its URL; several models may have the same.
        model: Id of the model.

    Raises:
        FolderError: The URL can't be used.
    """

    def __init__(self, place: str, model: str) -> None:
        self.place = place
        name = quote(model, safe="")
        self._files: _Files
        if "://" in place:
            self._files = _Objects(f"{place.rstrip('/')}/{name}")
        else:
            self._files = _Directory(Path(place).expanduser() / name)

    def read(self) -> dict[str, AdapterSettings]:
        """Return the adapters by their ids.

        Raises:
            FolderError: The folder can't be read, or has a file that is no adapter.
        """
        found = {}
        try:
            for data in self._files.read():
                adapter = AdapterSettings.model_validate_json(data)
                assert adapter.id is not None
                found[adapter.id] = adapter
        except (ValidationError, AssertionError) as error:
            raise FolderError(
                f"adapters_folder: {self.place} has a file that is no adapter: {error}"
            ) from None
        except Exception as error:
            # Each storage has errors of its own; the text is for the one who set it up.
            raise FolderError(f"adapters_folder: {self.place} can't be read: {error!r}") from error
        return found

    def write(self, id: str, adapter: AdapterSettings) -> None:
        """Add an adapter, durably.

        Raises:
            FolderError: The folder is full, or can't be written.
        """
        if len(self.read()) >= MAX_ADAPTERS:
            raise FolderError(
                f"adapters_folder: {self.place} has {MAX_ADAPTERS} adapters, which are the most"
            )
        text = adapter.model_copy(update={"id": id}).model_dump_json(exclude_defaults=True)
        self._change(lambda: self._files.write(_name(id), text.encode()))

    def remove(self, id: str) -> None:
        """Remove an adapter, durably; one that isn't there is ignored.

        Raises:
            FolderError: The folder can't be written.
        """
        self._change(lambda: self._files.remove(_name(id)))

    def _change(self, change: Any) -> None:
        try:
            change()
        except Exception as error:
            # As for reading.
            raise FolderError(f"adapters_folder: {self.place} can't be written: {error!r}") from error


def _name(id: str) -> str:
    return quote(id, safe="") + ENDING
