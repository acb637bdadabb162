"""The databases that may hold the state, and the way to their tables from each earlier version.

`dumps` has the state as each version left it, made by the version itself: two batches of anna, of which `b`
has two of its three rows finished, and a file of ben.
"""

import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.jobs import failpoints
from serve_app.jobs.db import METADATA, WITHOUT_FILE, Database, SQLite
from serve_app.jobs.errors import DatabaseError, HeldError, StoreError
from serve_app.jobs.forecast import Hour
from serve_app.jobs.migrations import VERSION, migrate
from serve_app.jobs.models import Counts
from serve_app.jobs.store import Store
from tests.serve_app.jobs.conftest import Place, database_at
from tests.serve_app.jobs.helpers import NOW, batch_of
from tests.serve_app.jobs.server import Server

THREADS, CHANGES = 4, 25
DUMPS = Path(__file__).parent / "dumps"
VERSIONS = range(1, VERSION + 1)

IDS = sa.select(WITHOUT_FILE.c.id).order_by(WITHOUT_FILE.c.id)


@pytest.fixture
def database(place: Place) -> Iterator[Database]:
    """A database with its tables."""
    database = database_at(place)
    migrate(database)
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


# Versions


def restored(kind: str, version: int, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """Return the place of a state as a version left it."""
    dump = (DUMPS / f"{kind}{version}.sql").read_text()
    if kind == "sqlite":
        folder = tmp_path / "old"
        folder.mkdir()
        database = sqlite3.connect(folder / "batches.db")
        database.executescript(dump)
        database.close()
        return lambda: folder
    import psycopg

    from serve_app.jobs.db import Postgres

    server: Server = request.getfixturevalue("postgres")
    url = server.database()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(dump.encode())
    return lambda: Postgres(url)


def schema_of(database: Database) -> dict[str, Any]:
    """Return columns, keys and indexes of all tables."""
    found: dict[str, Any] = {}
    with database.transaction() as connection:
        inspector = sa.inspect(connection)
        for table in METADATA.tables:
            key = inspector.get_pk_constraint(table)["constrained_columns"]
            columns = {
                # A key is never null, whether its column says so or not.
                name: (_kind(connection, column["type"]), column["nullable"] and name not in key)
                for column in inspector.get_columns(table)
                for name in [column["name"]]
            }
            indexes = {
                (index["name"], tuple(index["column_names"]))
                for index in inspector.get_indexes(table)
                if not index.get("duplicates_constraint")
            }
            unique = {tuple(one["column_names"]) for one in inspector.get_unique_constraints(table)}
            found[table] = columns, key, indexes, unique
    return found


def _kind(connection: sa.Connection, kind: Any) -> str:
    """Return the type of a column. SQLite has one kind of integers and one of floats, by several names."""
    name = str(kind)
    if connection.dialect.name != "sqlite":
        return name
    return "INTEGER" if "INT" in name else "REAL" if name[:4] in ("DOUB", "FLOA", "REAL") else name


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_state_of_each_version_goes_on(
    kind: str, version: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = restored(kind, version, tmp_path, request)
    store = Store(place())
    assert store._database.version() == VERSION
    batch, other = store.batch("b"), store.batch("c")
    assert (batch.state, batch.total, batch.completed, batch.failed) == ("in_progress", 3, 1, 1)
    assert (batch.output_bytes, batch.error_bytes, batch.metadata) == (10, 20, {"a": "ü"})
    assert batch.weight == (None if version < 2 else 2.5)
    assert batch.api_key == ("" if version < 3 else "ada")
    assert batch.rights == ({} if version < 5 else {"models": ["demo"], "max_lines": 7})
    assert batch.promised == (version >= 6)
    assert [one.id for one in store.open_batches()] == ["b", "c"]
    assert store.finished("b", 1, 3) == {1, 3}
    assert store.file("ben", "free").filename == "ü.jsonl"
    store.finish(batch, [2], Counts(1, 0, 0, 5, 0, 7, 0, 9))
    batch = store.batch("b")
    assert (batch.completed, batch.input_tokens, batch.output_tokens) == (2, 7, 9)
    store.move("b", "finalizing", NOW)
    store.end("b", "completed", NOW)
    assert store.move("c", "cancelling", NOW) == replace(other, state="cancelling", cancelling_at=NOW)
    store.add_batch(batch_of("d", "in-b"), 9)
    assert [one.id for one in store.batches("anna").items] == ["d", "c", "b"]
    store.keep_capacity("demo", [Hour(7, 1.0, 2.0, 3.0)])
    store.keep_capacity("demo", [Hour(7, 4.0, 5.0, 6.0, 0.5), Hour(8)])
    assert store.capacity() == {"demo": [Hour(7, 4.0, 5.0, 6.0, 0.5), Hour(8)]}
    store.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_each_version_comes_to_the_tables_of_a_new_database(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "sqlite":
        new: Database = SQLite(tmp_path / "new")
    else:
        from serve_app.jobs.db import Postgres

        new = Postgres(request.getfixturevalue("postgres").database())
    migrate(new)
    expected = schema_of(new)
    new.close()
    for version in VERSIONS:
        (tmp_path / str(version)).mkdir()
        old = database_at(restored(kind, version, tmp_path / str(version), request))
        migrate(old)
        assert schema_of(old) == expected, f"version {version}"
        old.close()


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    db = sqlite3.connect(tmp_path / "batches.db")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match="99"):
        Store(tmp_path)
