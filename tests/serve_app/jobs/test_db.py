"""A transaction is whole or nothing in each database, which one process has open and one version writes."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from serve_app.jobs import failpoints
from serve_app.jobs.db import VERSION, WITHOUT_FILE, Database, SQLite
from serve_app.jobs.errors import DatabaseError, HeldError, StoreError
from serve_app.jobs.store import Store
from tests.serve_app.jobs.conftest import Place, database_at

THREADS, CHANGES = 4, 25

IDS = sa.select(WITHOUT_FILE.c.id).order_by(WITHOUT_FILE.c.id)


@pytest.fixture
def database(place: Place) -> Iterator[Database]:
    """A database with its tables."""
    database = database_at(place)
    database.prepare()
    yield database
    database.close()


def add(connection: sa.Connection, *ids: str) -> None:
    connection.execute(sa.insert(WITHOUT_FILE), [{"id": id} for id in ids])


def ids(database: Database) -> list[str]:
    return [row["id"] for row in database.rows(IDS)]


def test_a_transaction_is_seen_once_it_is_committed(database: Database) -> None:
    with database.transaction() as connection:
        add(connection, "a")
        assert connection.execute(IDS).scalars().all() == ["a"]
        assert ids(database) == []
    assert ids(database) == ["a"]


def test_an_error_rolls_back_all_of_a_transaction(database: Database) -> None:
    def change_and_fail() -> None:
        with database.transaction() as connection:
            add(connection, "a", "b")
            raise KeyError

    with pytest.raises(KeyError):
        change_and_fail()
    assert ids(database) == []


def test_an_error_of_the_database_is_translated_and_the_next_call_works(database: Database) -> None:
    def add_twice() -> None:
        with database.transaction() as connection:
            add(connection, "a")
            add(connection, "secret")
            add(connection, "secret")

    with pytest.raises(DatabaseError) as caught:
        add_twice()
    assert "INSERT" not in str(caught.value), "a message has no statement and no values"
    with pytest.raises(DatabaseError):
        database.rows(sa.text("SELECT nothing FROM owner"))
    assert ids(database) == []
    with database.transaction() as connection:
        add(connection, "a")
    assert ids(database) == ["a"]


@pytest.mark.parametrize(("point", "after"), [("store.commit", []), ("store.committed", ["a"])])
def test_a_process_that_ends_at_a_point_has_committed_only_behind_it(
    database: Database, point: str, after: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(reached: str) -> None:
        if reached == point:
            raise SystemExit

    monkeypatch.setattr(failpoints, "hook", end)
    with pytest.raises(SystemExit), database.transaction() as connection:
        add(connection, "a")
    assert ids(database) == after


def test_threads_take_turns(database: Database) -> None:
    def count() -> None:
        for _ in range(CHANGES):
            with database.transaction() as connection:
                number = len(connection.execute(IDS).all())
                add(connection, f"{number:04}")

    threads = [threading.Thread(target=count) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ids(database) == [f"{number:04}" for number in range(THREADS * CHANGES)]


def test_one_process_has_a_database_open_until_it_closes_it(place: Place) -> None:
    database = database_at(place)
    assert database.version() == 0
    with pytest.raises(HeldError, match="another process"):
        database_at(place)
    database.close()
    database_at(place).close()


def test_a_file_that_is_no_database_is_named_and_not_held(tmp_path: Path) -> None:
    (tmp_path / "batches.db").write_bytes(b"not a database, by far" * 100)
    for _ in range(2):
        with pytest.raises(DatabaseError, match=r"batches\.db: file is not a database"):
            SQLite(tmp_path)


def test_a_new_folder_of_batches_is_closed_to_other_users(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    SQLite(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_database_of_another_version_is_refused(place: Place, version: int) -> None:
    database = database_at(place)
    database.prepare()
    with database.transaction() as connection:
        database.keep_version(connection, version)
    database.close()
    with pytest.raises(StoreError, match=f"version {version}, and this release reads .* begin with a new"):
        Store(place())
