"""Contents, on a disk and in object storages that are in memory."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import IO, Any
from uuid import uuid4

import pytest

from serve_app.jobs.content import Content, DiskContent, Draft, Input, Storage
from serve_app.jobs.errors import ContentLostError
from tests.serve_app.jobs.helpers import bytes_of

Open = Callable[..., Content[Input]]


@pytest.fixture(params=["disk", "memory", "buffered"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage[Input]:
    if request.param == "disk":
        return DiskContent(tmp_path)
    pytest.importorskip("fsspec", reason="fsspec is not installed here (pip install -e '.[storage]')")
    from serve_app.jobs.object_storage import Objects
    from tests.serve_app.jobs import buffered_storage

    assert buffered_storage.PROTOCOL == "buffered"
    return Objects(f"{request.param}://{uuid4().hex}")


@pytest.fixture
def opened(storage: Storage[Input], tmp_path: Path) -> Open:
    """Opens the contents as the owner of an epoch."""

    def open(epoch: int = 1, storage: Storage[Input] = storage, **options: Any) -> Content[Input]:
        return Content(tmp_path, epoch, storage, **options)

    return open


@pytest.fixture
def content(opened: Open) -> Content[Input]:
    return opened()


def keep(content: Content[Input], id: str, *texts: bytes) -> Draft:
    draft = content.draft()
    for text in texts:
        draft.write(text)
    content.keep(draft, id)
    return draft


def test_a_draft_becomes_a_content(content: Content[Input]) -> None:
    draft = content.draft()
    draft.write(b"one\n")
    assert content.size("a") is None
    draft.discard()
    assert not draft.path.exists()
    draft = keep(content, "a", b"one\n", b"two\n")
    assert (draft.size, content.size("a"), content.size("b")) == (8, 8, None)
    assert bytes_of(content, "a", 8) == b"one\ntwo\n"
    assert bytes_of(content, "a", 4) == b"one\n"
    assert not draft.path.exists()
    with content.path("a").open("rb") as file:
        file.seek(4)
        assert (file.readline(), file.tell()) == (b"two\n", 8)


def test_drafts_of_earlier_epochs_are_deleted(opened: Open) -> None:
    earlier, own = opened(2).draft(), opened(3).draft()
    opened(3)
    assert [earlier.path.exists(), own.path.exists()] == [False, True]


def test_a_draft_is_deleted_although_its_last_bytes_find_no_space(content: Content[Input]) -> None:
    draft = content.draft()
    with draft._file:
        draft._file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")
    draft.write(b"one")
    draft.discard()
    assert not draft.path.exists()


def test_results_are_parts_until_they_are_sealed(content: Content[Input], storage: Storage[Input]) -> None:
    content.append("a", 0, b"one\n")
    content.append("a", 4, b"two\n")
    # This one was never committed.
    content.append("a", 8, b"lost line\n")
    content.append("a", 8, b"three\n")
    assert content.size("a") is None
    assert bytes_of(content, "a", 14) == b"one\ntwo\nthree\n"
    assert b"".join(content.pieces("a", 14, 2)) == b"e\ntwo\nthree\n"
    assert b"".join(content.pieces("a", 10, 4)) == b"two\nth"
    assert b"".join(content.pieces("a", 10, 10)) == b""
    content.append("a", 14, b"not committed\n")
    for _ in range(2):
        content.seal("a", 14)
        assert content.size("a") == 14
        assert bytes_of(content, "a", 14) == b"one\ntwo\nthree\n"
    assert storage.list("parts/a") == {}
    content.remove("a")
    content.remove("a")
    assert content.size("a") is None


def test_nothing_committed_is_no_content(content: Content[Input], storage: Storage[Input]) -> None:
    content.append("a", 0, b"not committed\n")
    for _ in range(2):
        content.seal("a", 0)
    assert (content.size("a"), storage.list("parts/a")) == (None, {})


def test_an_earlier_offset_counts(content: Content[Input]) -> None:
    content.append("a", 0, b"one\ntwo\n")
    content.append("a", 8, b"three\n")
    content.append("a", 4, b"2\n")
    content.append("a", 6, b"3\n")
    assert bytes_of(content, "a", 8) == b"one\n2\n3\n"
    content.append("a", 0, b"x\n")
    content.seal("a", 2)
    assert bytes_of(content, "a", 2) == b"x\n"


def test_a_content_that_got_lost_is_told(content: Content[Input]) -> None:
    with pytest.raises(ContentLostError, match="gone"):
        content.append("a", 4, b"two\n")
    with pytest.raises(ContentLostError, match="gone"):
        bytes_of(content, "a", 4)
    content.append("a", 0, b"one")
    for lost in (lambda: bytes_of(content, "a", 4), lambda: content.seal("a", 4)):
        with pytest.raises(ContentLostError, match="shorter"):
            lost()
    content.remove("a")
    with pytest.raises(ContentLostError):
        content.append("a", 3, b"two")


def test_own_parts_that_are_gone_are_told_when_they_are_merged(opened: Open, storage: Storage[Input]) -> None:
    content = opened(merged_parts=4)
    for number in range(4):
        content.append("a", number, b"x")
    storage.remove([f"parts/a/{name}" for name in storage.list("parts/a")])
    with pytest.raises(ContentLostError):
        content.append("a", 4, b"x")


def test_a_long_content_has_few_parts(opened: Open, storage: Storage[Input]) -> None:
    content = opened(part_bytes=40, merged_parts=4)
    most = 0
    for number in range(200):
        content.append("a", 2 * number, b"x\n")
        most = max(most, len(storage.list("parts/a")))
    # A part of 128 bytes is made of 64, and three of each smaller size may follow.
    assert most <= 400 // 128 + 4 * 3
    assert bytes_of(content, "a", 400) == b"x\n" * 200
    content.seal("a", 400)
    assert bytes_of(content, "a", 400) == b"x\n" * 200


def test_an_owner_that_was_taken_over_destroys_nothing(opened: Open) -> None:
    """The probe of a defect: it cut off what the new owner had committed."""
    first, second = opened(1), opened(2)
    first.append("a", 0, b"1" * 1000)
    second.append("a", 1000, b"2" * 500)
    # It knows the length before, or has read the new one and can't commit.
    first.append("a", 1000, b"x" * 300)
    first.append("a", 1500, b"x" * 300)
    assert bytes_of(second, "a", 1500) == b"1" * 1000 + b"2" * 500
    second.append("a", 1500, b"3" * 10)
    first.take_back("a", 1500)
    assert bytes_of(second, "a", 1510) == b"1" * 1000 + b"2" * 500 + b"3" * 10
    second.seal("a", 1510)
    with suppress(ContentLostError):
        first.append("a", 1000, b"x" * 300)
    assert bytes_of(second, "a", 1510) == b"1" * 1000 + b"2" * 500 + b"3" * 10


def test_nothing_is_appended_to_a_content_that_is_complete(opened: Open) -> None:
    keep(opened(1), "a", b"one\n")
    with pytest.raises(ContentLostError, match="complete"):
        opened(2).append("a", 4, b"two\n")


class FailsError(OSError):
    """An error of the storage."""


class Failing:
    """A storage whose calls fail from time to time, before or after they have done what they should."""

    def __init__(self, storage: Storage[Input]) -> None:
        self._storage = storage
        self.left = -1

    def _call(self, name: str, *args: Any) -> Any:
        # An error doesn't say whether the storage has done it.
        self._fail()
        found = getattr(self._storage, name)(*args)
        self._fail()
        return found

    def _fail(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise FailsError

    def input(self, name: str) -> Input:
        return self._storage.input(name)

    def open(self, name: str) -> IO[bytes]:
        file: IO[bytes] = self._call("open", name)
        return file

    def size(self, name: str) -> int | None:
        size: int | None = self._call("size", name)
        return size

    def list(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = self._call("list", folder)
        return found

    def put(self, draft: Draft, name: str) -> None:
        self._call("put", draft, name)

    def remove(self, names: Sequence[str]) -> None:
        self._call("remove", names)

    def remove_folder(self, folder: str) -> None:
        self._call("remove_folder", folder)


@pytest.mark.parametrize(
    "seed", [*range(30), *(pytest.param(n, marks=pytest.mark.long) for n in range(30, 100))]
)
def test_results_are_whole_whatever_fails(
    seed: int, opened: Open, storage: Storage[Input], tmp_path: Path
) -> None:
    """Appends that fail anywhere and are tried again, owners that are replaced and go on, and readers."""
    random = Random(seed)
    failing, epoch = Failing(storage), 1

    def owner() -> Content[Input]:
        return opened(epoch, failing, part_bytes=40, merged_parts=4)

    content, stale = owner(), None
    committed, known = b"", 0
    reader, seen = content.pieces("a", 0), b""
    while len(committed) < 400:
        data = bytes(random.choices(b"abc\n", k=random.randint(1, 12)))
        failing.left = random.randint(1, 24)
        try:
            content.append("a", len(committed), data)
        except OSError:
            if random.random() < 0.3:
                stale, known, epoch = content, len(committed), epoch + 1
                content = owner()
        else:
            if random.random() < 0.8:
                committed += data
        if stale and random.random() < 0.3:
            # It may be at the length that it knew, or have read the new one.
            with suppress(OSError, ContentLostError):
                stale.append("a", random.choice((known, len(committed))), random.randbytes(20))
        failing.left = -1
        if random.random() < 0.2:
            reader = content.pieces("a", len(committed), start := random.randint(0, len(committed)))
            seen = committed[:start]
        for piece in islice(reader, random.randint(0, 2)):
            seen += piece
            assert committed.startswith(seen)
        assert bytes_of(content, "a", len(committed)) == committed
    failing.left = random.randint(1, 24)
    with suppress(OSError):
        content.seal("a", len(committed))
    failing.left = -1
    for one in filter(None, (stale, content)):
        one.seal("a", len(committed))
        assert bytes_of(content, "a", len(committed)) == committed
    assert storage.list("parts/a") == {}
    assert content.size("a") == len(committed)
    content._drafts.rmdir()
