"""Inner names, long names and test files without a docstring grow no more; a growth is named with its fix."""

from pathlib import Path

from tests.limits import counted, grown, recorded

TEXT = f"""
from serve_app.jobs import Store
from serve_app.jobs.db import (
    SQLite as Database,
    VERSION,
)

def test_{"word_" * 12}word() -> None:
    from serve_app.ledger.writer import Ledger
"""


def test_no_count_has_grown() -> None:
    assert grown(counted(), recorded()) == []


def test_names_and_imports_of_a_room_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "serve_app/jobs"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(TEXT)
    found = counted(tmp_path)
    one = {"serve_app/jobs": 1}
    assert found == {"long names": one, "without a docstring": one, "inner names": {"serve_app/jobs": 2}}
    assert grown(found, found) == []
    assert grown(found, {**found, "inner names": {"serve_app/batches": 2}}) == [], "the folder has a new name"
    (problem,) = grown(found, {**found, "inner names": one})
    assert problem.startswith("tests/serve_app/jobs: inner names: 2, at most 1: import the room's face")
