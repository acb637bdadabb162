"""Files of the ledger go to their place in an object storage."""

from pathlib import Path
from uuid import uuid4

import pytest

from serve_app.ledger.remote import Remote

pytest.importorskip("fsspec")


@pytest.mark.parametrize("scheme", ["memory", "local"])
def test_a_file_goes_to_its_place_and_replaces_an_earlier_one(scheme: str, tmp_path: Path) -> None:
    remote = Remote(f"{scheme}://{tmp_path}/{uuid4().hex}")
    path = Path("day=2026-11-23", "a.00000.jsonl")
    for content in (b"one\n", b"one\ntwo\n"):
        remote.write(path, content)
        assert remote._fs.cat_file(str(remote.root / path)) == content


def test_a_scheme_that_is_not_known_is_told() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        Remote("nowhere://bucket")
