"""LoRA adapters, as far as vLLM has no part in it: their files, the folder that keeps them, their places."""

import asyncio
import itertools
import json
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote
from uuid import uuid4

from pydantic import ValidationError

from serve_app.settings.adapters import AdapterSettings
from serve_app.system.disk import sync
from serve_app.system.distribution import extra
from serve_app.system.hub_errors import explain

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

MAX_BYTES = 16 << 30
"""Maximum bytes of an adapter."""

MAX_CONFIG_BYTES = 4 << 20
"""Maximum bytes of its configuration, which is read as a whole."""

COPIES = "saturate-adapters-"
"""Prefix of the name of a directory of copies; the id of its process follows."""

ENDING = ".json"
"""Ending of the name of an adapter's file in the folder."""

MAX_ADAPTERS = 1_000
"""Maximum adapters of a model in the folder."""

STORAGE = f"for s3:// and gs://: {extra('storage')}"


class AdapterError(Exception):
    """An adapter can't be used; the message says why, to the administrator who names it."""


class FolderError(Exception):
    """The folder of the adapters can't be used."""


class Adapter(NamedTuple):
    """The copy of an adapter in a directory of this process.

    Attributes:
        path: The directory.
        rank: The largest rank of its matrices.
    """

    path: Path
    rank: int


class AdapterFiles:
    """Copies of adapters, which outlive their sources.

    Args:
        root: The directory in which the copies get a directory; None: the system's for temporary files.
        max_bytes: Maximum bytes of an adapter's weights.
    """

    def __init__(self, root: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
        root = root or Path(tempfile.gettempdir())
        for left in root.glob(f"{COPIES}*-*"):
            # A process that was killed leaves its copies behind.
            pid = left.name.removeprefix(COPIES).partition("-")[0]
            if pid.isdecimal() and not Path("/proc", pid).exists():
                shutil.rmtree(left, ignore_errors=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{COPIES}{os.getpid()}-", dir=root))
        self._max_bytes = max_bytes
        self._numbers = itertools.count()

    def fetch(self, location: str) -> Adapter:
        """Copy an adapter into a new directory.

        Args:
            location: A directory, a Hugging Face id, or a URL that fsspec knows.

        Raises:
            AdapterError: The source can't be read, or is not an adapter.
        """
        path = self._folder / str(next(self._numbers))
        try:
            path.mkdir()
            copy = self._download if location.startswith("/") or "://" in location else self._from_hub
            copy(location, path)
            return Adapter(path, _rank(path))
        except AdapterError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        except Exception as error:
            # Each storage has errors of its own.
            shutil.rmtree(path, ignore_errors=True)
            raise AdapterError(f"can't be read: {type(error).__name__}: {error}") from None

    def close(self) -> None:
        """Delete all copies."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _download(self, location: str, target: Path) -> None:
        try:
            fs, root = _file_system(location)
        except ImportError as error:
            raise AdapterError(f"needs a package of its scheme: {STORAGE} ({error})") from None
        from fsspec.callbacks import Callback

        for name in (CONFIG, WEIGHTS):
            path = f"{root.rstrip('/')}/{name}"
            if not fs.exists(path):
                raise AdapterError(
                    f"has no file {name}; an adapter in PEFT's format has {CONFIG} and {WEIGHTS}"
                )
            self._check_size(name, fs.size(path))
            # A web server need not tell the size, or the right one.
            bounded = Callback(
                hooks={"size": lambda _, value, name=name, **__: self._check_size(name, value)}
            )
            fs.get_file(path, str(target / name), callback=bounded)

    def _from_hub(self, repository: str, target: Path) -> None:
        from huggingface_hub import hf_hub_download

        # Both files are of one commit.
        commit: str | None = None
        for name in (CONFIG, WEIGHTS):
            try:
                found = hf_hub_download(repository, name, revision=commit, dry_run=True)
                self._check_size(name, found.file_size)
                path = hf_hub_download(repository, name, revision=commit)
                commit = found.commit_hash
            except AdapterError:
                raise
            except Exception as error:  # The client's versions raise errors of different HTTP libraries.
                failure = explain(error, repository, name, kind="adapter", revision=commit)
                raise AdapterError(f"can't be read: {failure.message}") from None
            shutil.copyfile(path, target / name)

    def _check_size(self, name: str, size: int | None) -> None:
        most = MAX_CONFIG_BYTES if name == CONFIG else self._max_bytes
        if size is not None and size > most:
            raise AdapterError(f"{name} has {size} bytes, and {most} are the most")


def _file_system(place: str, **options: Any) -> tuple[Any, str]:
    """Return fsspec's file system of a path or URL, and the path inside of it."""
    from fsspec import filesystem
    from fsspec.core import url_to_fs

    if "://" not in place:
        # `url_to_fs` takes a path with `::` for a chain of URLs.
        return filesystem("file"), place
    found: tuple[Any, str] = url_to_fs(place, **options)
    return found


def _rank(path: Path) -> int:
    """Return the largest rank that the configuration of an adapter names; vLLM checks the rest of it."""
    try:
        config = json.loads((path / CONFIG).read_text())
        ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
        if all(type(rank) is int and rank > 0 for rank in ranks):
            return int(max(ranks))
        reason = f"a rank (r, rank_pattern) is a positive integer, not {ranks!r:.80}"
    except Exception as error:
        # The file may hold anything, such as lists that are nested too deep to be read.
        reason = repr(error)
    raise AdapterError(f"{CONFIG} does not describe a LoRA adapter in PEFT's format: {reason}")


class AdapterFolder:
    """The adapters of one model that were loaded while the service ran, in a folder that all processes share.

    Each adapter is a file of its own, written and removed as a whole: any process may write, and may end at
    any moment. The methods take a while, and belong in a thread.

    Args:
        place: The folder, or its URL; several models may have the same.
        model: Id of the model.
        max_adapters: Maximum adapters of the model.

    Raises:
        FolderError: The URL can't be used.
    """

    def __init__(self, place: str, model: str, max_adapters: int = MAX_ADAPTERS) -> None:
        self._place = place
        self._max_adapters = max_adapters
        # The adapters that were read last, and by which details of their files, by path.
        self._known: dict[str, tuple[str, AdapterSettings]] = {}
        name = quote(model, safe="")
        root = place.rstrip("/") if "://" in place else Path(place).expanduser().absolute()
        try:
            self._fs, self._root = _file_system(f"{root}/{name}", use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise FolderError(f"adapters_folder: {place}: {error}; {STORAGE}") from None
        from fsspec.implementations.local import LocalFileSystem

        self._local = isinstance(self._fs, LocalFileSystem)

    def read(self) -> dict[str, AdapterSettings]:
        """Return the adapters by their ids; only files that are new or have changed are read.

        Raises:
            FolderError: The folder can't be read, or has a file that is not an adapter.
        """
        known = {}
        with self._explained("can't be read"):
            for path, details in self._list().items():
                before = self._known.get(path)
                if before is None or before[0] != details:
                    try:
                        adapter = AdapterSettings.model_validate_json(self._fs.cat_file(path))
                        assert adapter.id is not None
                    except FileNotFoundError:
                        # Another process has removed it meanwhile.
                        continue
                    except (ValidationError, AssertionError) as error:
                        raise FolderError(
                            f"adapters_folder: {self._place} has a file that is not an adapter: {error}"
                        ) from None
                    before = details, adapter
                known[path] = before
        self._known = known
        return {str(adapter.id): adapter for _, adapter in known.values()}

    def write(self, id: str, adapter: AdapterSettings) -> None:
        """Add an adapter, durably.

        Raises:
            FolderError: The folder is full, or can't be written.
        """
        data = adapter.model_copy(update={"id": id}).model_dump_json(exclude_defaults=True).encode()
        path = self._path(id)
        with self._explained("can't be written"):
            if len(self._list().keys() - {path}) >= self._max_adapters:
                raise FolderError(
                    f"adapters_folder: {self._place} has {self._max_adapters} adapters, which are the most"
                )
            self._fs.makedirs(self._root, exist_ok=True)
            if not self._local:
                self._fs.pipe_file(path, data)
                return
            # fsspec neither syncs a file nor replaces it as a whole.
            draft = Path(self._root, f".{uuid4().hex}")
            try:
                with draft.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
            sync(self._root)

    def remove(self, id: str) -> None:
        """Remove an adapter, durably; an adapter that isn't there is ignored.

        Raises:
            FolderError: The folder can't be written.
        """
        with self._explained("can't be written"), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(id))
            if self._local:
                sync(self._root)

    def _path(self, id: str) -> str:
        return f"{self._root}/{quote(id, safe='')}{ENDING}"

    def _list(self) -> dict[str, str]:
        """Return the details of the adapters' files, which change with their contents, by path."""
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            if self._fs.exists(self._root):
                raise
            return {}
        found = {}
        for entry in sorted(entries, key=lambda entry: str(entry["name"])):
            if (path := entry["name"]).endswith(ENDING):
                # A link has times of its own: its file is read each time.
                found[path] = str(uuid4()) if entry.get("islink") else repr(entry)
        return found

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except FolderError:
            raise
        except Exception as error:
            # Each storage has errors of its own; the text is for the administrator who set it up.
            raise FolderError(f"adapters_folder: {self._place} {what}: {error!r}") from error


class AdapterSlots:
    """The places of adapters in an engine, as lanes of the batcher: a record names the adapter that it needs.

    vLLM serves adapters that are loaded before all others, for as long as requests for them come.

    So the batcher starts a request only if `take` gives it a place. An adapter without requests stays until
    another adapter needs its place. If all have requests, the least recently used adapter drains: `take`
    refuses its further requests until any adapter has no requests, or no request wants the place any more.
    The order of the refused requests is the batcher's: it tries them again after a True of `give` or
    `unwanted`, and after each `on_change`. A need is the adapter's id, without a prefix. All methods belong
    in the event loop.

    Args:
        count: The slots.

    Attributes:
        count: The slots.
        on_change: Called when requests that were refused may get a place for a reason of the engine's.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.on_change: Callable[[], object] = lambda: None
        # The requests of each adapter that has a place; the least recently used one goes first.
        self._requests: OrderedDict[str, int] = OrderedDict()
        # Adapters without a place of which requests were refused.
        self._wanted: set[str] = set()
        self._draining: str | None = None
        self._claims = asyncio.Lock()
        # Wakes `left` and `claim`; it is cleared at once.
        self._freed = asyncio.Event()

    @property
    def resident(self) -> list[str]:
        """The adapters that have a place."""
        return list(self._requests)

    def take(self, need: str) -> bool:
        """Take a place for one request now.

        Args:
            need: Id of its adapter.

        Returns:
            False: there is none now. If the adapter has no place, it is wanted, until `unwanted`.
        """
        resident = need in self._requests
        if need != self._draining and (resident or not self._claims.locked()) and self._enter(need):
            return True
        if not resident:
            self._wanted.add(need)
        self._drain()
        return False

    def give(self, need: str) -> bool:
        """Give back the place of a request that has ended.

        Returns:
            True: requests that were refused may get a place now.
        """
        self._requests[need] -= 1
        if self._requests[need]:
            return False
        self._wake()
        return self._reopened()

    def unwanted(self, need: str) -> bool:
        """Forget that an adapter is wanted: no request waits for it any more.

        Returns:
            True: requests that were refused may get a place now.
        """
        self._wanted.discard(need)
        return not self._wanted and self._draining is not None and self._reopened()

    def remove(self, adapter: str) -> None:
        """Free the place of an adapter if it has no requests."""
        if not self._requests.get(adapter, 1):
            del self._requests[adapter]
        self._wake()
        if self._reopened():
            self.on_change()

    async def left(self, adapter: str) -> None:
        """Wait until an adapter has no requests."""
        while self._requests.get(adapter):
            await self._freed.wait()

    @asynccontextmanager
    async def claim(self, adapter: str) -> AsyncIterator[None]:
        """Hold a place for a use of the engine that doesn't pass the batcher, before all that wait there."""
        try:
            async with self._claims:
                while not self._enter(adapter):
                    self._drain()
                    await self._freed.wait()
        finally:
            # `take` has refused requests meanwhile, and `give` has told of no place.
            if self._reopened():
                self.on_change()
        try:
            yield
        finally:
            if self.give(adapter):
                self.on_change()

    def _enter(self, adapter: str) -> bool:
        """Take a place for a request; an adapter without requests gives its place away."""
        if adapter not in self._requests and len(self._requests) >= self.count:
            if (gone := next((one for one in self._requests if not self._requests[one]), None)) is None:
                return False
            del self._requests[gone]
        self._wanted.discard(adapter)
        self._requests[adapter] = self._requests.get(adapter, 0) + 1
        self._requests.move_to_end(adapter)
        return True

    def _drain(self) -> None:
        """Let the least recently used adapter drain, unless another adapter does."""
        if self._draining is None:
            self._draining = next(iter(self._requests), None)

    def _reopened(self) -> bool:
        """End the drain, as places can be had again; return whether requests may have been refused."""
        if self._claims.locked():
            # The claim gets the place; its end reopens the others.
            return False
        refused = self._draining is not None or bool(self._wanted)
        self._draining = None
        return refused

    def _wake(self) -> None:
        self._freed.set()
        self._freed.clear()
