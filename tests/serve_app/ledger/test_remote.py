"""Files of the ledger go to their place in an object storage."""

from pathlib import Path
from uuid import uuid4

import pytest

from serve_app.ledger.remote import Remote

pytest.importorskip("fsspec")


@pytest.fixture
def url() -> str:
    """A folder of its own in fsspec's storage in memory."""
    return f"memory://{uuid4().hex}"


def test_a_file_of_a_spool_goes_to_its_place(url: str, tmp_path: Path) -> None:
    remote = Remote(url)
    spool = tmp_path / "day=2026-11-23" / "a.00000.jsonl"
    spool.parent.mkdir()
    spool.write_bytes(b"one\n")
    upload = remote.uploader(tmp_path)
    upload(spool)
    place = remote.root / "day=2026-11-23" / "a.00000.jsonl"
    assert remote._fs.cat_file(str(place)) == b"one\n"
    spool.write_bytes(b"one\ntwo\n")
    upload(spool)
    assert remote._fs.cat_file(str(place)) == b"one\ntwo\n"


def test_a_scheme_that_is_not_known_is_told() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        Remote("nowhere://bucket")
