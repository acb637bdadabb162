"""Databases of the state: what was saved is there, all or nothing, and one process at a time saves."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from serve_app.ledger.disk import LocalDisk
from serve_app.quotas.state import (
    QuotaStateError,
    SQLState,
    State,
    TakenOverError,
    open_state,
)
from tests.serve_app.jobs.server import Server, start


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = start()
    yield server
    server.stop()


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], State]:
    """Opens the same database."""
    if request.param == "SQLite":
        return lambda: open_state(tmp_path / "new", None)
    url = request.getfixturevalue("server").database()
    return lambda: open_state(None, url)


def test_what_was_saved_is_loaded(opened: Callable[[], State]) -> None:
    state = opened()
    assert state.load() == {}
    state.save({"a": "1", "b": "2"})
    state.save({"b": None, "c": "3", "a": "4"})
    state.save({})
    state.close()
    again = opened()
    assert again.load() == {"a": "4", "c": "3"}
    again.close()


def test_the_process_that_loads_last_has_the_state(opened: Callable[[], State]) -> None:
    first, second = opened(), opened()
    first.load()
    first.save({"a": "1"})
    assert second.load() == {"a": "1"}
    with pytest.raises(TakenOverError):
        first.save({"a": "2"})
    second.save({"b": "1"})
    first.close()
    second.close()
    third = opened()
    assert third.load() == {"a": "1", "b": "1"}
    third.close()


def test_the_place_has_no_password(opened: Callable[[], State]) -> None:
    assert "secret" not in opened().place


def test_a_database_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QuotaStateError, match=r"quotas\.db"):
        open_state(tmp_path / "file" / "folder", None)
    with pytest.raises(QuotaStateError, match="postgresql://"):
        open_state(None, f"postgresql://postgres@/x?host={tmp_path}").load()


def test_a_state_that_was_emptied_is_not_the_process_s_any_more(opened: Callable[[], State]) -> None:
    state = opened()
    state.load()
    state.save({"a": "1"})
    # By hand, to begin anew.
    assert isinstance(state, SQLState)
    with state._engine.begin() as db:
        db.execute(text(f"DELETE FROM {state._table.name}"))
    with pytest.raises(TakenOverError):
        state.save({"a": "2"})
    state.close()


def test_only_this_user_may_read_the_state_and_the_ledger(tmp_path: Path) -> None:
    open_state(tmp_path / "state" / "quotas", None).close()
    LocalDisk().append(tmp_path / "ledger" / "day=2026-11-29" / "a.jsonl", b"{}\n")
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "state", tmp_path / "ledger")}
    assert set(modes.values()) == {0o700}
    assert (tmp_path / "state" / "quotas" / "quotas.db").stat().st_mode & 0o077 == 0
