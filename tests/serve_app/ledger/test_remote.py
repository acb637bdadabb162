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
    assert remote.read(place) == b"one\n"
    spool.write_bytes(b"one\ntwo\n")
    upload(spool)
    assert remote.read(place) == b"one\ntwo\n"


def test_files_are_listed_in_order_also_those_of_another_process(url: str) -> None:
    remote, other = Remote(url), Remote(url)
    assert remote.files(remote.root, "day=*/*") == []
    for day in ("2026-11-24", "2026-11-23"):
        other.write(Path(f"day={day}") / "a.00000.jsonl", b"row\n")
    other.write(Path("prices.json"), b"{}")
    assert [path.parent.name for path in remote.files(remote.root, "day=*/*")] == [
        "day=2026-11-23",
        "day=2026-11-24",
    ]


def test_a_file_that_is_not_there_is_told(url: str) -> None:
    remote = Remote(url)
    with pytest.raises(FileNotFoundError):
        remote.read(remote.root / "prices.json")


def test_nothing_is_locked_there(url: str) -> None:
    remote = Remote(url)
    assert not remote.locked(remote.root / "open" / "a.lock")


def test_a_scheme_that_is_not_known_is_told() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        Remote("nowhere://bucket")
