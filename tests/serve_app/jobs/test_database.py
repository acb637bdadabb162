import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.jobs import failpoints
from serve_app.jobs.database import Database, SQLite
from serve_app.jobs.errors import DatabaseError, HeldError
from tests.serve_app.jobs.conftest import Place, database_at

THREADS, CHANGES = 4, 25


@pytest.fixture
def database(place: Place) -> Iterator[Database]:
    """A database with one table of one number."""
    database = database_at(place)
    database.change_schema(["CREATE TABLE counter (id INTEGER PRIMARY KEY, value INTEGER)"], 1)
    with database.transaction() as transaction:
        transaction.change("INSERT INTO counter VALUES (?, ?)", 1, 0)
    yield database
    database.close()


def value(database: Database) -> int:
    (row,) = database.rows("SELECT value FROM counter WHERE id = ?", 1)
    return int(row["value"])


def test_a_transaction_is_seen_once_it_is_committed(database: Database) -> None:
    with database.transaction() as transaction:
        assert transaction.change("UPDATE counter SET value = ?", 5) == 1
        assert transaction.rows("SELECT value FROM counter") == [{"value": 5}]
        assert value(database) == 0
    assert value(database) == 5


def test_an_error_rolls_back_all_of_a_transaction(database: Database) -> None:
    def change_and_fail() -> None:
        with database.transaction() as transaction:
            transaction.change("UPDATE counter SET value = ?", 5)
            transaction.change_many("INSERT INTO counter VALUES (?, ?)", [(2, 2), (3, 3)])
            raise KeyError

    with pytest.raises(KeyError):
        change_and_fail()
    assert database.rows("SELECT id, value FROM counter") == [{"id": 1, "value": 0}]


def test_an_error_of_the_database_is_translated_and_the_next_call_works(database: Database) -> None:
    def add_twice() -> None:
        with database.transaction() as transaction:
            transaction.change("UPDATE counter SET value = ?", 5)
            transaction.change("INSERT INTO counter VALUES (?, ?)", 1, 1)

    with pytest.raises(DatabaseError):
        add_twice()
    with pytest.raises(DatabaseError):
        database.rows("SELECT nothing FROM counter")
    assert value(database) == 0
    with database.transaction() as transaction:
        transaction.change("UPDATE counter SET value = ?", 6)
    assert value(database) == 6


@pytest.mark.parametrize(("point", "after"), [("store.commit", 0), ("store.committed", 5)])
def test_a_process_that_ends_at_a_point_has_committed_only_behind_it(
    database: Database, point: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(reached: str) -> None:
        if reached == point:
            raise SystemExit

    monkeypatch.setattr(failpoints, "hook", end)
    with pytest.raises(SystemExit), database.transaction() as transaction:
        transaction.change("UPDATE counter SET value = ?", 5)
    assert value(database) == after


def test_threads_take_turns(database: Database) -> None:
    def count() -> None:
        for _ in range(CHANGES):
            with database.transaction() as transaction:
                (row,) = transaction.rows("SELECT value FROM counter")
                transaction.change("UPDATE counter SET value = ?", row["value"] + 1)

    threads = [threading.Thread(target=count) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value(database) == THREADS * CHANGES


def test_a_change_of_the_schema_is_made_whole_or_not_at_all(database: Database) -> None:
    with pytest.raises(DatabaseError):
        database.change_schema(["CREATE TABLE another (id INTEGER)", "CREATE TABLE counter (id INTEGER)"], 2)
    assert database.version() == 1
    database.change_schema(["CREATE TABLE another (id INTEGER)"], 2)
    assert database.version() == 2
    assert database.rows("SELECT id FROM another") == []


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
