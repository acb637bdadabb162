"""Durable state of files and batches. All queries are here."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Literal, TypeVar

from pydantic_core import from_json, to_json

from serve_app.api.protocol import JSON
from serve_app.jobs.content import FOLDER
from serve_app.jobs.database import Database, Row, SQLite, Transaction
from serve_app.jobs.errors import (
    FencedError,
    InUseError,
    NotFoundError,
    StateError,
    StoreError,
    TooManyError,
)
from serve_app.jobs.forecast import Hour
from serve_app.jobs.models import ENDED, STATES, TRANSITIONS, Batch, Counts, File, Page, State, Summary
from serve_app.jobs.schema import prepare

T = TypeVar("T")

LATEST = 1000
"""Most batches that say what tenants ask for."""

OPEN_STATES = ", ".join(f"'{state}'" for state in STATES if state not in ENDED)


class Store:
    """Files and batches of all tenants. Its methods may be called in any thread.

    A store owns the batches from its opening until another store opens the same database. The lock of the
    database keeps two of them apart, but a lock can get lost: PostgreSQL's with a connection, a file's on a
    network file system. So each store takes an epoch, which is higher than all before, and each change checks
    in its own transaction that no higher epoch was taken. A store with an older epoch changes nothing more:
    its changes, and `open_batches`, raise a FencedError.

    Args:
        where: The database; a folder: SQLite in it.
        clock: Seconds since the epoch of the clock.

    Attributes:
        epoch: The number of this ownership.

    Raises:
        HeldError: Another process has it open.
        StoreError: It belongs to another version, or is new beside contents of an earlier one.
        DatabaseError: It fails.
    """

    def __init__(self, where: Path | Database, clock: Callable[[], float] = time.time) -> None:
        self._database = SQLite(where) if isinstance(where, Path) else where
        try:
            if isinstance(where, Path) and not self._database.version() and any((where / FOLDER).glob("*")):
                raise StoreError(
                    f"{self._database.place}: it is missing or empty, and {where / FOLDER} has files; "
                    "restore it from a backup, or move the folder away to begin anew"
                )
            prepare(self._database)
            self.epoch = self._take_over(int(clock()))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def add_file(self, file: File, max_bytes: int | None = None, max_files: int | None = None) -> None:
        """Add a file whose content is on the disk.

        Args:
            file: The file.
            max_bytes: Most bytes of all uploaded files of the tenant; None: no limit.
            max_files: Most uploaded files of the tenant; None: no limit.

        Raises:
            TooManyError: The tenant would have more.
        """
        query = (
            "SELECT COUNT(*) AS files, COALESCE(SUM(bytes), 0) AS used FROM files "
            "WHERE tenant = ? AND purpose = 'batch'"
        )
        with self._transaction() as db:
            (own,) = db.rows(query, file.tenant)
            if max_bytes is not None and int(own["used"]) + file.bytes > max_bytes:
                raise TooManyError(f"the files of this tenant would have more than {max_bytes} bytes")
            if max_files is not None and own["files"] >= max_files:
                raise TooManyError(f"this tenant has {max_files} files, which is the limit")
            _insert(db, "files", _columns(file))
            db.change("DELETE FROM contents_without_file WHERE id = ?", file.id)

    def note_content(self, id: str) -> None:
        """Note a content that has no file yet."""
        with self._transaction() as db:
            _note(db, [id])

    def noted_contents(self) -> list[str]:
        """Return the ids of the contents that may be there without a file."""
        return [row["id"] for row in self._rows("SELECT id FROM contents_without_file")]

    def forget_contents(self, ids: Sequence[str]) -> None:
        """Forget noted contents, which are deleted."""
        with self._transaction() as db:
            db.change_many("DELETE FROM contents_without_file WHERE id = ?", [(id,) for id in ids])

    def file(self, tenant: str, id: str) -> File:
        """Return a file; raise a NotFoundError if the tenant has none of this id."""
        rows = self._rows("SELECT * FROM files WHERE id = ? AND tenant = ?", id, tenant)
        if not rows:
            raise NotFoundError(id)
        return _file(rows[0])

    def files(
        self,
        tenant: str,
        *,
        after: str | None = None,
        limit: int = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Page[File]:
        """Return files in the order of their creation, the latest first.

        Args:
            tenant: Their owner.
            after: Id of the last file of the page before.
            limit: Most files to return.
            order: "asc": the earliest first.
            purpose: Only files with this purpose.

        Raises:
            NotFoundError: The tenant has no file `after`.
        """
        conditions, values = ["tenant = ?"], [tenant]
        if purpose is not None:
            conditions.append("purpose = ?")
            values.append(purpose)
        return _page(self._after("files", tenant, conditions, values, after, limit, order), limit, _file)

    def remove_file(self, tenant: str, id: str) -> None:
        """Forget a file, and note its content, which may be deleted afterwards, not before.

        Raises:
            NotFoundError: The tenant has no such file.
            InUseError: An open batch reads it.
        """
        with self._transaction() as db:
            if not db.change("DELETE FROM files WHERE id = ? AND tenant = ?", id, tenant):
                raise NotFoundError(id)
            if _in_use(db, id):
                raise InUseError(id)
            _note(db, [id])

    def remove_expired(self, now: int) -> list[str]:
        """Forget the files whose time is over, but for those that open batches read, and note their contents.

        Returns:
            Their ids.
        """
        query = (
            "DELETE FROM files WHERE expires_at <= ? AND id NOT IN "
            f"(SELECT input_file FROM batches WHERE state IN ({OPEN_STATES})) RETURNING id"
        )
        with self._transaction() as db:
            return _note(db, [row["id"] for row in db.rows(query, now)])

    def add_batch(self, batch: Batch, max_open: int, max_batches: int | None = None) -> list[str]:
        """Add a batch. The weight that it states holds for the tenant's open batches from now on.

        Args:
            batch: The batch.
            max_open: Most batches of the tenant that haven't ended.
            max_batches: Most batches of the tenant: the oldest that ended are forgotten beyond it, with their
                results; None: no limit.

        Returns:
            Ids of the results that are forgotten; their contents are noted, and may be deleted now.

        Raises:
            NotFoundError: The tenant has no such input file.
            TooManyError: The tenant has `max_open` open batches already.
        """
        count = f"SELECT COUNT(*) AS open FROM batches WHERE tenant = ? AND state IN ({OPEN_STATES})"
        with self._transaction() as db:
            query = "SELECT 1 AS there FROM files WHERE id = ? AND tenant = ?"
            if not db.rows(query, batch.input_file, batch.tenant):
                raise NotFoundError(batch.input_file)
            if db.rows(count, batch.tenant)[0]["open"] >= max_open:
                raise TooManyError(f"{max_open} batches of this tenant are open, which is the limit")
            _insert(db, "batches", _columns(batch))
            if batch.weight is not None:
                change = f"UPDATE batches SET weight = ? WHERE tenant = ? AND state IN ({OPEN_STATES})"
                db.change(change, batch.weight, batch.tenant)
            return [] if max_batches is None else _remove_oldest(db, batch.tenant, max_batches)

    def remove_expired_batches(self, now: int, retention_s: int) -> None:
        """Forget batches that ended, and whose window did, `retention_s` ago; none before its results."""
        ended = "COALESCE(completed_at, failed_at, expired_at, cancelled_at)"
        with self._transaction() as db:
            db.change(
                f"DELETE FROM batches WHERE expires_at <= ? AND {ended} <= ? AND {ended} + retention_s <= ?",
                now - retention_s,
                now - retention_s,
                now,
            )

    def batch(self, id: str, tenant: str | None = None) -> Batch:
        """Return a batch; raise a NotFoundError if there is none of this id, or another tenant's."""
        rows = self._rows("SELECT * FROM batches WHERE id = ?", id)
        if not rows or tenant not in (None, rows[0]["tenant"]):
            raise NotFoundError(id)
        return _batch(rows[0])

    def batches(self, tenant: str, *, after: str | None = None, limit: int = 20) -> Page[Batch]:
        """Return batches, the latest first.

        Args:
            tenant: Their owner.
            after: Id of the last batch of the page before.
            limit: Most batches to return.

        Raises:
            NotFoundError: The tenant has no batch `after`.
        """
        rows = self._after("batches", tenant, ["tenant = ?"], [tenant], after, limit, "desc")
        return _page(rows, limit, _batch)

    def open_batches(self) -> list[Batch]:
        """Return the batches that haven't ended, the earliest first.

        Raises:
            FencedError: Another process has taken them over.
        """
        self._check_epoch(self._rows("SELECT epoch FROM owner"))
        query = f"SELECT * FROM batches WHERE state IN ({OPEN_STATES}) ORDER BY number"
        return [_batch(row) for row in self._rows(query)]

    def latest_batches(self, since: int) -> list[Batch]:
        """Return the latest batches of all tenants, those that have ended too.

        Args:
            since: The earliest creation, in seconds since the epoch.
        """
        query = "SELECT * FROM batches WHERE created_at >= ? ORDER BY number DESC LIMIT ?"
        return [_batch(row) for row in self._rows(query, since, LATEST)]

    def capacity(self) -> dict[str, list[Hour]]:
        """Return what is known of the work that the engines do, by model."""
        found: dict[str, list[Hour]] = {}
        for row in self._rows("SELECT * FROM capacity"):
            values = {field.name: row[field.name] for field in fields(Hour)}
            found.setdefault(row["model"], []).append(Hour(**values))
        return found

    def keep_capacity(self, model: str, hours: Sequence[Hour]) -> None:
        """Store what is known of a model, in place of what is stored of these hours."""
        values = [(model, one.hour, one.work, one.seconds, one.at, one.error) for one in hours]
        with self._transaction() as db:
            db.change_many(
                "INSERT INTO capacity (model, hour, work, seconds, at, error) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (model, hour) DO UPDATE SET work = excluded.work, seconds = excluded.seconds, "
                "at = excluded.at, error = excluded.error",
                values,
            )

    def summary(self) -> Summary:
        """Return what is open, and what is stored, of all tenants."""
        states = self._rows(
            "SELECT state, COUNT(*) AS batches, SUM(total - completed - failed) AS unfinished, "
            f"MIN(created_at) AS oldest FROM batches WHERE state IN ({OPEN_STATES}) GROUP BY state"
        )
        (files,) = self._rows("SELECT COUNT(*) AS files, COALESCE(SUM(bytes), 0) AS bytes FROM files")
        return Summary(
            {row["state"]: row["batches"] for row in states},
            sum(int(row["unfinished"]) for row in states),
            min((row["oldest"] for row in states), default=None),
            files["files"],
            int(files["bytes"]),
        )

    def remove_excess(self, most_bytes: int) -> list[str]:
        """Forget the oldest result files of each tenant that has more bytes of them, and note their contents.

        Returns:
            Their ids.
        """
        query = (
            "DELETE FROM files WHERE id IN (SELECT id FROM ("
            "SELECT id, SUM(bytes) OVER (PARTITION BY tenant ORDER BY number DESC) AS together "
            "FROM files WHERE purpose <> 'batch') AS sums WHERE together > ?) RETURNING id"
        )
        with self._transaction() as db:
            return _note(db, [row["id"] for row in db.rows(query, most_bytes)])

    def move(
        self,
        id: str,
        to: State,
        now: int,
        *,
        total: int | None = None,
        model: str | None = None,
        work: float = 0.0,
        errors: Sequence[JSON] = (),
    ) -> Batch:
        """Bring a batch into another state, which isn't one of the last ones; return it.

        Args:
            id: The batch.
            to: The state.
            now: Time of the change, in seconds since the epoch.
            total: Number of rows, if they were validated now.
            model: The model of all rows then; None: they have several.
            work: Bound of their work then.
            errors: Errors of the batch as a whole, if there are any now.

        Raises:
            StateError: `TRANSITIONS` has no way there from the present state.
        """
        with self._transaction() as db:
            _check(db, id, to)
            changes: dict[str, object] = {"state": to, f"{to}_at": now}
            if total is not None:
                changes |= {"total": total, "model": model, "work": work}
            if errors:
                changes["errors"] = to_json(list(errors)).decode()
            marks = ", ".join(f"{name} = ?" for name in changes)
            db.change(f"UPDATE batches SET {marks} WHERE id = ?", *changes.values(), id)
        return self.batch(id)

    def end(self, id: str, to: State, now: int, errors: Sequence[JSON] = ()) -> None:
        """Bring a batch into one of the last states. Its output and error file become files of the tenant.

        Args:
            id: The batch.
            to: The state.
            now: Time of the change, in seconds since the epoch.
            errors: Errors of the batch as a whole.

        Raises:
            StateError: `TRANSITIONS` has no way there from the present state.
        """
        with self._transaction() as db:
            batch = _check(db, id, to)
            for file_id, kind, size in (
                (batch.output_file, "output", batch.output_bytes),
                (batch.error_file, "error", batch.error_bytes),
            ):
                if size:
                    file = File(
                        id=file_id,
                        tenant=batch.tenant,
                        filename=f"{id}_{kind}.jsonl",
                        purpose="batch_output",
                        bytes=size,
                        created_at=now,
                        expires_at=now + batch.retention_s,
                    )
                    _insert(db, "files", _columns(file))
            db.change(
                f"UPDATE batches SET state = ?, {to}_at = ?, errors = ? WHERE id = ?",
                to,
                now,
                to_json(list(errors)).decode(),
                id,
            )
            db.change("DELETE FROM finished WHERE batch = ?", id)

    def batch_to_write(self, id: str) -> Batch:
        """Return a batch whose results are about to be appended.

        It is read as a change is made, so that a commit before whose end wasn't known has its end by now.

        Raises:
            NotFoundError: There is none of this id.
        """
        with self._database.transaction() as db:
            self._check_epoch(db.rows("SELECT epoch FROM owner"))
            rows = db.rows("SELECT * FROM batches WHERE id = ?", id)
        if not rows:
            raise NotFoundError(id)
        return _batch(rows[0])

    def finish(self, batch: Batch, lines: Sequence[int], counts: Counts) -> Batch:
        """Commit rows whose results are in the output or error file; return the batch as it is then.

        Args:
            batch: The batch as it was when these results were appended.
            lines: Input lines of the rows.
            counts: What they add.

        Raises:
            AssertionError: The batch has changed since; nothing is committed.
        """
        with self._transaction() as db:
            db.change_many("INSERT INTO finished VALUES (?, ?)", [(batch.id, line) for line in lines])
            changed = db.change(
                f"UPDATE batches SET {', '.join(f'{name} = {name} + ?' for name in Counts._fields)} "
                "WHERE id = ? AND output_bytes = ? AND error_bytes = ?",
                *counts,
                batch.id,
                batch.output_bytes,
                batch.error_bytes,
            )
            if changed != 1:
                raise AssertionError(f"{batch.id}: two writers")
        return self.batch(batch.id)

    def finished(self, id: str, first: int, last: int) -> set[int]:
        """Return which of the input lines from `first` to `last` are finished."""
        query = "SELECT line FROM finished WHERE batch = ? AND line BETWEEN ? AND ?"
        return {row["line"] for row in self._rows(query, id, first, last)}

    def finished_of(self, id: str, lines: Sequence[int]) -> set[int]:
        """Return which of some input lines are finished."""
        query = f"SELECT line FROM finished WHERE batch = ? AND line IN ({', '.join('?' * len(lines))})"
        return {row["line"] for row in self._rows(query, id, *lines)}

    def _take_over(self, now: int) -> int:
        """Become the owner, and return the epoch.

        Epochs begin at the time: a database that was restored from a backup repeats none of the epochs that
        it has forgotten, of which there may be contents.
        """
        take = "UPDATE owner SET epoch = CASE WHEN epoch < ? THEN ? ELSE epoch + 1 END RETURNING epoch"
        with self._database.transaction() as db:
            (row,) = db.rows(take, now, now)
        return int(row["epoch"])

    @contextmanager
    def _transaction(self) -> Iterator[Transaction]:
        """Return a context of a change: another store that opens the database waits for its end."""
        with self._database.transaction() as db:
            self._check_epoch(db.rows(f"SELECT epoch FROM owner{self._database.share}"))
            yield db

    def _check_epoch(self, owner: list[Row]) -> None:
        (row,) = owner
        if row["epoch"] != self.epoch:
            raise FencedError(
                f"{self._database.place}: another process has taken over these batches (its epoch is "
                f"{row['epoch']}, the one of this process {self.epoch}); this process writes nothing more"
            )

    def _rows(self, query: str, *values: object) -> list[Row]:
        return self._database.rows(query, *values)

    def _after(
        self,
        table: str,
        tenant: str,
        conditions: list[str],
        values: Sequence[object],
        after: str | None,
        limit: int,
        order: Literal["asc", "desc"],
    ) -> list[Row]:
        """Return one row more than `limit`, if there are so many behind `after`."""
        values = list(values)
        if after is not None:
            found = self._rows(f"SELECT number FROM {table} WHERE id = ? AND tenant = ?", after, tenant)
            if not found:
                raise NotFoundError(after)
            conditions = [*conditions, "number > ?" if order == "asc" else "number < ?"]
            values.append(found[0]["number"])
        query = f"SELECT * FROM {table} WHERE {' AND '.join(conditions)} ORDER BY number {order} LIMIT ?"
        return self._rows(query, *values, limit + 1)


def _check(db: Transaction, id: str, to: State) -> Batch:
    rows = db.rows("SELECT * FROM batches WHERE id = ?", id)
    if not rows:
        raise NotFoundError(id)
    batch = _batch(rows[0])
    if to not in TRANSITIONS[batch.state]:
        raise StateError(f"a batch that is {batch.state} can't become {to}")
    return batch


def _in_use(db: Transaction, file: str) -> bool:
    query = f"SELECT 1 AS there FROM batches WHERE input_file = ? AND state IN ({OPEN_STATES})"
    return bool(db.rows(query, file))


def _remove_oldest(db: Transaction, tenant: str, most: int) -> list[str]:
    """Forget the oldest ended batches of a tenant that has more than `most`; return their files."""
    own = db.rows("SELECT COUNT(*) AS batches FROM batches WHERE tenant = ?", tenant)[0]["batches"]
    if own <= most:
        return []
    ended = f"tenant = ? AND state NOT IN ({OPEN_STATES})"
    query = (
        f"DELETE FROM batches WHERE number IN (SELECT number FROM batches WHERE {ended} "
        "ORDER BY number LIMIT ?) RETURNING output_file, error_file"
    )
    forgotten = db.rows(query, tenant, own - most)
    remove = "DELETE FROM files WHERE id IN (?, ?) RETURNING id"
    files = [db.rows(remove, batch["output_file"], batch["error_file"]) for batch in forgotten]
    return _note(db, [file["id"] for found in files for file in found])


def _note(db: Transaction, ids: list[str]) -> list[str]:
    """Note contents that have no file, and return their ids."""
    query = "INSERT INTO contents_without_file VALUES (?) ON CONFLICT DO NOTHING"
    db.change_many(query, [(id,) for id in ids])
    return ids


def _insert(db: Transaction, table: str, columns: dict[str, object]) -> None:
    marks = ", ".join("?" * len(columns))
    db.change(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", *columns.values())


def _page(rows: list[Row], limit: int, read: Callable[[Row], T]) -> Page[T]:
    return Page([read(row) for row in rows[:limit]], len(rows) > limit)


def _columns(item: File | Batch) -> dict[str, object]:
    values = {field.name: getattr(item, field.name) for field in fields(item)}
    return {
        name: to_json(value).decode() if isinstance(value, dict | tuple) else value
        for name, value in values.items()
    }


def _file(row: Row) -> File:
    return File(**{field.name: row[field.name] for field in fields(File)})


def _batch(row: Row) -> Batch:
    values = {field.name: row[field.name] for field in fields(Batch)}
    values["metadata"] = from_json(values["metadata"])
    values["errors"] = tuple(from_json(values["errors"]))
    values["rights"] = from_json(values["rights"])
    values["promised"] = bool(values["promised"])
    return Batch(**values)
