"""A transaction is whole or nothing in each database, and one process at a time owns the database."""

import sqlite3
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from serve_app.system.database import (
    Database,
    DatabaseError,
    FencedError,
    UnusableError,
    journal_mode,
    open_database,
)

THREADS, CHANGES = 4, 25

TABLES = sa.MetaData()
NAMES = sa.Table("names", TABLES, sa.Column("id", sa.Text(), primary_key=True))
OTHERS = sa.MetaData()
sa.Table("other_names", OTHERS, sa.Column("id", sa.Text(), primary_key=True))

IDS = sa.select(NAMES.c.id).order_by(NAMES.c.id)

Open = Callable[..., Database]


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """The place of a database."""
    if request.param == "SQLite":
        return tmp_path / "names.db"
    url: str = request.getfixturevalue("postgres").database()
    return url


@pytest.fixture
def opened(where: Path | str) -> Open:
    """Opens the database."""
    return partial(open_database, where, "names", TABLES, 3)


@pytest.fixture
def database(opened: Open) -> Iterator[Database]:
    """A database with its tables."""
    database = opened()
    yield database
    database.close()


def add(connection: sa.Connection, *ids: str) -> None:
    connection.execute(sa.insert(NAMES), [{"id": id} for id in ids])


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


def test_a_wrong_statement_is_no_failure_of_the_database(database: Database) -> None:
    def add_twice() -> None:
        with database.transaction() as connection:
            add(connection, "a")
            add(connection, "secret")
            add(connection, "secret")

    def read() -> None:
        database.rows(sa.text("SELECT nothing FROM names"))

    for wrong in (add_twice, read):
        with pytest.raises((sqlite3.Error, psycopg.Error)) as caught:
            wrong()
        shown = "".join(traceback.format_exception(caught.value))
        assert "INSERT" not in shown, "a message has no statement and no values"
    assert ids(database) == []
    with database.transaction() as connection:
        add(connection, "a")
    assert ids(database) == ["a"]


@pytest.mark.parametrize(("point", "after"), [("store.commit", []), ("store.committed", ["a"])])
def test_a_process_that_ends_at_a_point_has_committed_only_behind_it(
    opened: Open, point: str, after: list[str]
) -> None:
    def end(reached: str) -> None:
        if reached == point and armed:
            raise SystemExit

    armed: list[bool] = []
    database = opened(reach=end)
    armed.append(True)
    with pytest.raises(SystemExit), database.transaction() as connection:
        add(connection, "a")
    assert ids(database) == after
    database.close()


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


def test_a_successor_takes_over_at_once_and_the_earlier_owner_commits_nothing(opened: Open) -> None:
    first, second = opened(), opened()
    assert second.epoch > first.epoch
    taken = pytest.raises(FencedError, match="another process has taken over these names")
    with taken, first.transaction() as connection:
        add(connection, "a")
    with pytest.raises(FencedError):
        first.check_owner()
    with second.transaction() as connection:
        add(connection, "b")
    second.check_owner()
    assert ids(first) == ids(second) == ["b"], "the earlier owner may still read"
    for one in (first, second):
        one.close()


def test_groups_of_tables_in_one_database_have_their_own_owners(where: Path | str) -> None:
    first = open_database(where, "names", TABLES, 3)
    other = open_database(where, "others", OTHERS, 1)
    first.check_owner()
    other.check_owner()
    for one in (first, other):
        one.close()


def test_epochs_begin_with_the_time_and_grow_without_it(opened: Open) -> None:
    epochs = []
    for now in (5.0, 9.5, 1.0, 1.0):
        database = opened(clock=lambda now=now: now)
        epochs.append(database.epoch)
        database.close()
    assert epochs == [5, 9, 10, 11]


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "names.db").write_bytes(b"not a database, by far" * 100)
    for _ in range(2):
        with pytest.raises(DatabaseError, match=r"names\.db: file is not a database"):
            open_database(tmp_path / "names.db", "names", TABLES, 1)


def test_a_new_database_is_closed_to_other_users(tmp_path: Path) -> None:
    file = tmp_path / "new" / "names.db"
    database = open_database(file, "names", TABLES, 1)
    modes = {path.stat().st_mode & 0o777 for path in file.parent.iterdir()}
    assert (file.parent.stat().st_mode & 0o777, modes) == (0o700, {0o600})
    database.close()


@pytest.mark.parametrize("version", [2, 4])
def test_a_database_of_another_version_is_refused(where: Path | str, version: int) -> None:
    open_database(where, "names", TABLES, 3).close()
    with pytest.raises(UnusableError, match=f"version 3, and this release reads version {version} alone"):
        open_database(where, "names", TABLES, version)


def test_tables_without_a_version_are_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "names.db"
    engine = sa.create_engine(f"sqlite:///{file}")
    TABLES.create_all(engine)
    engine.dispose()
    with pytest.raises(UnusableError, match="version 0, and this release reads version 3 alone"):
        open_database(file, "names", TABLES, 3)


MOUNTS = """
/dev/sda1 / ext4 rw 0 0
files:/ /shared nfs4 rw,vers=4.2,local_lock=none 0 0
files:/ /shared/old nfs rw,vers=3,local_lock=all 0 0
//files/x /two\\040words cifs rw 0 0
//files/x /windows cifs rw,nobrl 0 0
me@there: /there fuse.sshfs rw 0 0
mountpoint-s3 /bucket fuse rw 0 0
/dev/sdb1 /shared/disk xfs rw 0 0
""".strip()


@pytest.mark.parametrize(
    ("folder", "mode"),
    [("/", "WAL"), ("/srv", "WAL"), ("/shared", "DELETE"), ("/shared/disk", "WAL"), ("/two words", "DELETE")],
)
def test_a_file_between_machines_has_no_shared_memory(folder: str, mode: str) -> None:
    assert journal_mode(Path(folder) / "names.db", MOUNTS) == mode


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/shared/old", "nfs"),
        ("/windows", "cifs"),
        ("/there", "fuse.sshfs"),
        ("/bucket", "fuse.mountpoint-s3"),
    ],
)
def test_a_file_system_without_locks_between_machines_is_refused(folder: str, kind: str) -> None:
    with pytest.raises(UnusableError, match=f"it is on {kind}, whose locks hold on one machine only"):
        journal_mode(Path(folder) / "names.db", MOUNTS)


def test_a_database_of_one_process_alone_is_open_to_no_other(tmp_path: Path) -> None:
    open_alone = partial(open_database, tmp_path / "names.db", "names", TABLES, 3, alone=True)
    first = open_alone()
    with first.transaction() as connection:
        add(connection, "a")
    with pytest.raises(DatabaseError, match="locked"):
        open_alone()
    assert ids(first) == ["a"]
    first.close()
    second = open_alone()
    assert ids(second) == ["a"]
    second.close()
