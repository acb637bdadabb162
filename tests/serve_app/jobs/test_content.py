"""Content[Any], on a disk and in object storages that are in memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from serve_app.jobs.content import Content, DiskContent
from serve_app.rows.errors import RunError
from tests.serve_app.jobs.helpers import bytes_of

Open = Callable[..., Content[Any]]


@pytest.fixture(params=["disk", "memory", "buffered"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "disk":
        return DiskContent(tmp_path)
    pytest.importorskip("fsspec", reason="fsspec is not installed here (pip install -e '.[storage]')")
    from serve_app.jobs.object_storage import Objects
    from tests.serve_app.jobs import buffered_storage

    assert buffered_storage.PROTOCOL == "buffered"
    return Objects(f"{request.param}://{uuid4().hex}")


@pytest.fixture
def opened(storage: Any, tmp_path: Path) -> Open:
    """Opens the contents as the owner of an epoch."""

    def open(epoch: int = 1, storage: Any = storage, **options: Any) -> Content[Any]:
        return Content(tmp_path, epoch, storage, **options)

    return open


@pytest.fixture
def content(opened: Open) -> Content[Any]:
    return opened()


def keep(content: Content[Any], id: str, *texts: bytes) -> Any:
    draft = content.draft()
    for text in texts:
        draft.write(text)
    content.keep(draft, id)
    return draft


def test_a_draft_becomes_a_content(content: Content[Any]) -> None:
    draft = content.draft()
    draft.write(b"one\n")
    with draft.open() as file:
        assert file.read() == b"one\n"
    assert content.size("a") is None
    draft.discard()
    assert not draft.path.exists()
    draft = keep(content, "a", b"one\n", b"two\n")
    assert (draft.size, content.size("a"), content.size("b")) == (8, 8, None)
    assert bytes_of(content, "a", 8) == b"one\ntwo\n"
    assert bytes_of(content, "a", 4) == b"one\n"
    assert not draft.path.exists()
    if (path := content.path("a")) is not None:
        assert path.read_bytes() == b"one\ntwo\n"


def test_drafts_of_earlier_epochs_are_deleted(opened: Open) -> None:
    earlier, own = opened(2).draft(), opened(3).draft()
    opened(3)
    assert [earlier.path.exists(), own.path.exists()] == [False, True]


def test_a_draft_is_deleted_although_its_last_bytes_find_no_space(content: Content[Any]) -> None:
    draft = content.draft()
    with draft._file:
        draft._file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")
    draft.write(b"one")
    draft.discard()
    assert not draft.path.exists()


def test_a_content_that_got_lost_is_told(content: Content[Any]) -> None:
    keep(content, "a", b"one")
    assert b"".join(content.pieces("a", 3, 1)) == b"ne"
    with pytest.raises(RunError, match="shorter"):
        bytes_of(content, "a", 4)
    for _ in range(2):
        content.remove("a")
    assert content.size("a") is None
    with pytest.raises(RunError, match="gone"):
        bytes_of(content, "a", 3)
