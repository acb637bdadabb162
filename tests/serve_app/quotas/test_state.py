"""The database of the state: what was saved is there, and the process that opens it last saves."""

from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.ledger.writer import Disk, Segment
from serve_app.quotas.state import StoredState
from serve_app.system.database import FencedError


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], StoredState]:
    """Opens the same database."""
    if request.param == "SQLite":
        return lambda: StoredState(tmp_path / "new" / "quotas.db")
    url = request.getfixturevalue("postgres").database()
    return lambda: StoredState(url)


def test_what_was_saved_is_loaded_by_the_process_that_opens_last(opened: Callable[[], StoredState]) -> None:
    first = opened()
    assert first.load() == {}
    first.save({"a": "1", "b": "2"})
    first.save({"b": None, "c": "3", "a": "4"})
    first.save({})
    second = opened()
    assert second.load() == {"a": "4", "c": "3"}
    with pytest.raises(FencedError):
        first.save({"a": "2"})
    second.save({"b": "1"})
    assert second.load() == {"a": "4", "b": "1", "c": "3"}
    first.close()
    second.close()


def test_only_this_user_may_read_the_state_and_the_ledger(tmp_path: Path) -> None:
    StoredState(tmp_path / "state" / "quotas" / "quotas.db").close()
    Segment(tmp_path / "ledger" / "day=2026-11-29" / "a.jsonl", Disk(), 0.0).close()
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "state", tmp_path / "ledger")}
    assert set(modes.values()) == {0o700}
    assert (tmp_path / "state" / "quotas" / "quotas.db").stat().st_mode & 0o077 == 0
