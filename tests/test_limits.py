"""Inner names, long names and test files without a docstring grow no more; a growth is named with its fix."""

from pathlib import Path

from tests.limits import counted, grown, recorded

TEXT = f"""
from serve_app.jobs import Store
from serve_app.jobs.db import (
    SQLite as Database,
    VERSION,
)
from serve_app.jobs.routes import BatchAPI

def test_{"word_" * 12}word() -> None:
    from serve_app.ledger.writer import Ledger
"""

FRONT = "from serve_app.jobs.routes import BatchAPI\n"


def test_no_count_has_grown() -> None:
    assert grown(counted(), recorded()) == []


def test_names_and_imports_of_a_room_are_counted(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    for path, text in (("tests/serve_app/jobs/test_it.py", TEXT), ("serve_app/ingress/front.py", FRONT)):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    found = counted(tests)
    one = {"serve_app/jobs": 1}
    assert found == {"long names": one, "without a docstring": one, "inner names": {"serve_app/jobs": 2}}
    assert grown(found, found) == []
    assert grown(found, {**found, "inner names": {"serve_app/batches": 2}}) == [], "the folder has a new name"
    (problem,) = grown(found, {**found, "inner names": one})
    assert problem.startswith("tests/serve_app/jobs: inner names: 2, at most 1: import the room's face")
