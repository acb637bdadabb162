import os
from pathlib import Path

import pytest

from serve_app.batches.content import Content
from serve_app.batches.errors import ContentLostError
from tests.serve_app.batches.helpers import ids_on_disk


@pytest.fixture
def content(tmp_path: Path) -> Content:
    return Content(tmp_path)


def test_a_draft_becomes_a_content(content: Content) -> None:
    draft = content.draft()
    draft.write(b"one")
    draft.write(b"two")
    assert (draft.size, ids_on_disk(content)) == (6, set())
    content.keep(draft, "a")
    assert b"".join(content.pieces("a", 6)) == b"onetwo"
    assert b"".join(content.pieces("a", 4)) == b"onet"
    assert not draft.path.exists()


def test_drafts_of_an_earlier_process_are_deleted(content: Content, tmp_path: Path) -> None:
    draft = content.draft()
    assert draft.path.exists()
    Content(tmp_path)
    assert not draft.path.exists()


def test_a_discarded_draft_is_gone(content: Content) -> None:
    draft = content.draft()
    draft.write(b"one")
    draft.discard()
    assert not draft.path.exists()


def test_a_draft_is_deleted_although_its_last_bytes_find_no_space(content: Content) -> None:
    draft = content.draft()
    with draft._file:
        draft._file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")
    draft.write(b"one")
    draft.discard()
    assert not draft.path.exists()


def test_an_append_cuts_off_what_was_not_committed(content: Content) -> None:
    content.append("a", 0, b"one\n")
    content.append("a", 4, b"torn li")
    content.append("a", 4, b"two\n")
    assert content.path("a").read_bytes() == b"one\ntwo\n"
    content.append("a", 8, b"torn")
    content.seal("a", 8)
    assert content.path("a").read_bytes() == b"one\ntwo\n"
    content.seal("a", 0)
    content.seal("a", 0)
    assert ids_on_disk(content) == set()


def test_a_part_of_a_content_can_be_read(content: Content) -> None:
    content.append("a", 0, b"0123456789")
    assert b"".join(content.pieces("a", 7, 3)) == b"3456"
    assert b"".join(content.pieces("a", 7, 7)) == b""


def test_a_content_that_got_lost_is_told(content: Content) -> None:
    with pytest.raises(ContentLostError, match="gone"):
        content.append("a", 4, b"two\n")
    with pytest.raises(ContentLostError, match="gone"):
        list(content.pieces("a", 4))
    content.append("a", 0, b"one")
    with pytest.raises(ContentLostError, match="shorter"):
        content.append("a", 4, b"two\n")
    with pytest.raises(ContentLostError, match="shorter"):
        list(content.pieces("a", 4))


def test_a_removed_content_may_be_gone_already(content: Content) -> None:
    content.append("a", 0, b"one")
    content.remove("a")
    content.remove("a")
    assert ids_on_disk(content) == set()
