"""Durable state of files and batches. All queries are here."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, RowMapping
from sqlalchemy.dialects import postgresql, sqlite

from serve_app.api.protocol import JSON
from serve_app.jobs.content import FOLDER
from serve_app.jobs.db import BATCHES, FILES, METADATA, PLANS, RESULTS, VERSION, WITHOUT_FILE
from serve_app.jobs.errors import (
    ContentLostError,
    InUseError,
    NotFoundError,
    StateError,
    StoreError,
    TooManyError,
)
from serve_app.jobs.failpoints import reach
from serve_app.jobs.models import ENDED, OPEN, TRANSITIONS, Batch, Counts, File, Page, State, Summary
from serve_app.jobs.plan import RowPlan, Target
from serve_app.rows.results import slices
from serve_app.rows.rows import Result, together
from serve_app.system.database import open_database

T = TypeVar("T")


IS_OPEN = BATCHES.c.state.in_(OPEN)

NOT_IN_USE = FILES.c.id.not_in(sa.select(BATCHES.c.input_file).where(IS_OPEN))
"""Files that no open batch reads."""

BATCH = sa.select(BATCHES).where(BATCHES.c.id == sa.bindparam("b_id"))
OPEN_BATCHES = sa.select(BATCHES).where(IS_OPEN).order_by(BATCHES.c.number)
COUNT = (
    sa.update(BATCHES)
    # A statement that runs with many rows of values can't have a list as a value.
    .where(BATCHES.c.id == sa.bindparam("b_id"), sa.or_(*(BATCHES.c.state == state for state in OPEN)))
    .values({name: BATCHES.c[name] + sa.bindparam(f"add_{name}") for name in Counts._fields})
)

RESULT_FILES = (
    sa.select(
        FILES.c.id,
        sa.func.sum(FILES.c.bytes)
        .over(partition_by=FILES.c.tenant, order_by=FILES.c.number.desc())
        .label("together"),
    )
    .where(FILES.c.purpose != "batch")
    .subquery()
)
"""Result files, each with the bytes of itself and of all newer result files of its tenant."""


class Store:
    """Files and batches of all tenants. Its methods may be called in any thread.

    A store owns the batches from its opening until another store opens the same database. From then on its
    changes, and `open_batches`, raise a FencedError.

    Args:
        where: A folder, for SQLite in it; or the URL of a database in PostgreSQL.

    Attributes:
        epoch: The number of this ownership.

    Raises:
        StoreError: The database is new beside existing contents.
        UnusableError: The database can't be used as it is.
        OSError: The folder or the file can't be made.
        DatabaseError: The database fails.
    """

    def __init__(self, where: Path | str) -> None:
        if isinstance(where, Path):
            contents, where = where / FOLDER, where / "batches.db"
            if not (where.exists() and where.stat().st_size) and any(contents.glob("*")):
                raise StoreError(
                    f"{where}: it is missing or empty, and {contents} has files; restore it from a backup, "
                    "or move the folder away to begin anew"
                )
        self._database = open_database(where, "batches", METADATA, VERSION, reach=reach)
        self.epoch = self._database.epoch

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def check_owner(self) -> None:
        """Raise a FencedError if another process has taken over the batches."""
        self._database.check_owner()

    def add_file(
        self,
        file: File,
        max_bytes: int | None = None,
        max_files: int | None = None,
        plan: RowPlan | None = None,
    ) -> None:
        """Add a file whose content is stored already.

        Args:
            file: The file.
            max_bytes: Most bytes of all uploaded files of the tenant; None: no limit.
            max_files: Most uploaded files of the tenant; None: no limit.
            plan: The plan of its rows; None: no batch reads the file.

        Raises:
            TooManyError: The tenant would exceed a limit.
        """
        own = sa.select(sa.func.count().label("files"), sa.func.sum(FILES.c.bytes).label("used")).where(
            FILES.c.tenant == file.tenant, FILES.c.purpose == "batch"
        )
        with self._transaction() as db:
            found = db.execute(own).one()
            if max_bytes is not None and int(found.used or 0) + file.bytes > max_bytes:
                raise TooManyError(f"the files of this tenant would have more than {max_bytes} bytes")
            if max_files is not None and found.files >= max_files:
                raise TooManyError(f"this tenant has {max_files} files, which is the limit")
            db.execute(sa.insert(FILES), _values(file))
            if plan is not None:
                parts = {"entries": bytes(plan.entries), "targets": plan.targets, "errors": plan.errors}
                db.execute(sa.insert(PLANS), {"file": file.id, **parts})
            db.execute(sa.delete(WITHOUT_FILE).where(WITHOUT_FILE.c.id == file.id))

    def note_content(self, id: str) -> None:
        """Note a content that has no file yet."""
        with self._transaction() as db:
            _note(db, [id])

    def noted_contents(self) -> list[str]:
        """Return the ids of the contents that may exist without a file."""
        return [row["id"] for row in self._database.rows(sa.select(WITHOUT_FILE))]

    def forget_contents(self, ids: Sequence[str]) -> None:
        """Forget noted contents that are deleted."""
        with self._transaction() as db:
            for some in slices(ids):
                db.execute(sa.delete(WITHOUT_FILE).where(WITHOUT_FILE.c.id.in_(some)))

    def file(self, tenant: str, id: str) -> File:
        """Return a file; raise a NotFoundError if the tenant has no file of this id."""
        rows = self._database.rows(sa.select(FILES).where(FILES.c.id == id, FILES.c.tenant == tenant))
        if not rows:
            raise NotFoundError(id)
        return _item(File, rows[0])

    def plan(self, id: str) -> RowPlan:
        """Return the plan of the rows of a file; raise a ContentLostError if there is none."""
        rows = self._database.rows(sa.select(PLANS).where(PLANS.c.file == id))
        if not rows:
            raise ContentLostError(f"the plan of {id} is gone")
        targets = [Target(*target) for target in rows[0]["targets"]]
        return RowPlan(rows[0]["entries"], targets, rows[0]["errors"])

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
        conditions = [] if purpose is None else [FILES.c.purpose == purpose]
        return self._page(FILES, File, tenant, conditions, after, limit, order)

    def remove_file(self, tenant: str, id: str) -> None:
        """Forget a file, and note its content, which may be deleted only afterwards.

        Raises:
            NotFoundError: The tenant has no such file.
            InUseError: It is the input of an open batch.
        """
        reading = sa.select(sa.literal(1)).where(BATCHES.c.input_file == id, IS_OPEN)
        with self._transaction() as db:
            if not db.execute(sa.delete(FILES).where(FILES.c.id == id, FILES.c.tenant == tenant)).rowcount:
                raise NotFoundError(id)
            if db.execute(reading).first():
                raise InUseError(id)
            _note(db, [id])

    def remove_expired(self, now: int) -> list[str]:
        """Forget expired files, except the files of open batches, and note their contents.

        Returns:
            The ids of the files.
        """
        remove = sa.delete(FILES).where(FILES.c.expires_at <= now, NOT_IN_USE)
        with self._transaction() as db:
            return _note(db, db.execute(remove.returning(FILES.c.id)).scalars().all())

    def remove_excess(self, most_bytes: int) -> list[str]:
        """Forget the oldest result files of each tenant beyond `most_bytes`, and note their contents.

        Returns:
            The ids of the files.
        """
        over = sa.select(RESULT_FILES.c.id).where(RESULT_FILES.c.together > most_bytes)
        remove = sa.delete(FILES).where(FILES.c.id.in_(over), NOT_IN_USE).returning(FILES.c.id)
        with self._transaction() as db:
            return _note(db, db.execute(remove).scalars().all())

    def add_batch(self, batch: Batch, max_open: int, max_batches: int | None = None) -> list[str]:
        """Add a batch. A weight in the batch holds for the tenant's open batches from now on.

        Args:
            batch: The batch.
            max_open: Most batches of the tenant that haven't ended.
            max_batches: Most batches of the tenant. Beyond this number the oldest ended batches are forgotten
                with their results. None: no limit.

        Returns:
            Ids of the forgotten results; their contents are noted, and may be deleted now.

        Raises:
            NotFoundError: The tenant has no such input file.
            TooManyError: The tenant has `max_open` open batches already.
        """
        tenant = batch.tenant
        own = sa.and_(BATCHES.c.tenant == tenant, IS_OPEN)
        input = sa.select(FILES.c.id).where(FILES.c.id == batch.input_file, FILES.c.tenant == tenant)
        with self._transaction() as db:
            if db.execute(input).first() is None:
                raise NotFoundError(batch.input_file)
            count = sa.select(sa.func.count()).select_from(BATCHES)
            if db.execute(count.where(own)).scalar_one() >= max_open:
                raise TooManyError(f"{max_open} batches of this tenant are open, which is the limit")
            db.execute(sa.insert(BATCHES), _values(batch))
            if batch.weight is not None:
                db.execute(sa.update(BATCHES).where(own).values(weight=batch.weight))
            if max_batches is None:
                return []
            excess = db.execute(count.where(BATCHES.c.tenant == tenant)).scalar_one() - max_batches
            return _remove_oldest(db, tenant, excess) if excess > 0 else []

    def remove_expired_batches(self, now: int, retention_s: int) -> None:
        """Forget batches whose end and window are `retention_s` ago, but no batch before its results."""
        ended = sa.func.coalesce(*(BATCHES.c[f"{state}_at"] for state in sorted(ENDED)))
        over = sa.and_(
            BATCHES.c.expires_at <= now - retention_s,
            ended <= now - retention_s,
            ended + BATCHES.c.retention_s <= now,
        )
        with self._transaction() as db:
            db.execute(sa.delete(BATCHES).where(over))

    def batch(self, id: str, tenant: str | None = None) -> Batch:
        """Return a batch; raise a NotFoundError if it doesn't exist, or belongs to another tenant."""
        rows = self._database.rows(BATCH, {"b_id": id})
        if not rows or tenant not in (None, rows[0]["tenant"]):
            raise NotFoundError(id)
        return _item(Batch, rows[0])

    def batches(self, tenant: str, *, after: str | None = None, limit: int = 20) -> Page[Batch]:
        """Return batches, the latest first.

        Args:
            tenant: Their owner.
            after: Id of the last batch of the page before.
            limit: Most batches to return.

        Raises:
            NotFoundError: The tenant has no batch `after`.
        """
        return self._page(BATCHES, Batch, tenant, [], after, limit, "desc")

    def open_batches(self) -> list[Batch]:
        """Return the batches that haven't ended, the earliest first.

        Raises:
            FencedError: Another process has taken over the batches.
        """
        self.check_owner()
        return [_item(Batch, row) for row in self._database.rows(OPEN_BATCHES)]

    def summary(self) -> Summary:
        """Return the totals of the open batches and of the stored files of all tenants."""
        unfinished = sa.func.sum(BATCHES.c.total - BATCHES.c.completed - BATCHES.c.failed)
        states = self._database.rows(
            sa.select(
                BATCHES.c.state,
                sa.func.count().label("batches"),
                unfinished.label("unfinished"),
                sa.func.min(BATCHES.c.created_at).label("oldest"),
            )
            .where(IS_OPEN)
            .group_by(BATCHES.c.state)
        )
        (files,) = self._database.rows(
            sa.select(sa.func.count().label("files"), sa.func.sum(FILES.c.bytes).label("bytes"))
        )
        return Summary(
            {row["state"]: row["batches"] for row in states},
            sum(int(row["unfinished"]) for row in states),
            min((row["oldest"] for row in states), default=None),
            files["files"],
            int(files["bytes"] or 0),
        )

    def move(
        self,
        id: str,
        to: State,
        now: int,
        *,
        total: int | None = None,
        model: str | None = None,
        errors: Sequence[JSON] = (),
    ) -> Batch:
        """Move a batch to another state that isn't final; return the batch.

        Args:
            id: The batch.
            to: The state.
            now: Time of the change, in seconds since the epoch.
            total: Number of rows, if they were validated now.
            model: The model of all rows, if they were validated now; None: they name several models.
            errors: New errors of the batch as a whole.

        Raises:
            StateError: `TRANSITIONS` doesn't allow the change from the present state.
        """
        changes: dict[str, Any] = {}
        if total is not None:
            changes |= {"total": total, "model": model}
        if errors:
            changes["errors"] = list(errors)
        with self._transaction() as db:
            _change_state(db, id, to, now, changes)
        return self.batch(id)

    def end(self, id: str, to: State, now: int, errors: Sequence[JSON] = ()) -> None:
        """Move a batch to a final state. Its output and error file become files of the tenant.

        Both files must have its results, which `remove_results` removes from the table.

        Args:
            id: The batch.
            to: The state.
            now: Time of the change, in seconds since the epoch.
            errors: Errors of the batch as a whole.

        Raises:
            StateError: `TRANSITIONS` doesn't allow the change from the present state.
        """
        with self._transaction() as db:
            batch = _change_state(db, id, to, now, {"errors": list(errors)})
            _add_results(db, batch, now)

    def record(self, results: Mapping[str, Sequence[Result]]) -> None:
        """Commit results of batches, all of them or none; results that are committed already are skipped.

        Args:
            results: Results of different rows, by the id of their open batch.
        """
        with self._transaction() as db:
            counts = [
                {"b_id": id} | {f"add_{name}": count for name, count in _counts(new)._asdict().items()}
                for id, new in RESULTS.add(db, results).items()
            ]
            if counts and db.execute(COUNT, counts).rowcount != len(counts):
                raise AssertionError(f"{[*results]}: not all of them are open")

    def remove_results(self, id: str) -> None:
        """Remove the results of a batch that has ended."""
        RESULTS.remove(self._database, id)

    def remove_left_results(self) -> None:
        """Remove the results of all batches that have ended."""
        for id in RESULTS.runs(self._database) - {batch.id for batch in self.open_batches()}:
            self.remove_results(id)

    def finished(self, id: str, first: int, last: int) -> set[int]:
        """Return which of the input lines from `first` to `last` of an open batch have a result."""
        return RESULTS.lines(self._database, id, first, last)

    def results(self, id: str, is_error: bool) -> Iterator[bytes]:
        """Yield the lines of the output or of the error file of an open batch, in the order of its input."""
        return (text for _, text in RESULTS.texts(self._database, id, is_error))

    def _transaction(self) -> AbstractContextManager[Connection]:
        return self._database.transaction()

    def _page(
        self,
        table: sa.Table,
        kind: type[T],
        tenant: str,
        conditions: list[sa.ColumnElement[bool]],
        after: str | None,
        limit: int,
        order: Literal["asc", "desc"],
    ) -> Page[T]:
        number = table.c.number
        if after is not None:
            place = sa.select(number).where(table.c.id == after, table.c.tenant == tenant)
            found = self._database.rows(place)
            if not found:
                raise NotFoundError(after)
            at = found[0]["number"]
            conditions = [*conditions, number > at if order == "asc" else number < at]
        query = sa.select(table).where(table.c.tenant == tenant, *conditions)
        # One extra row shows whether more rows follow.
        query = query.order_by(number.asc() if order == "asc" else number.desc()).limit(limit + 1)
        rows = self._database.rows(query)
        return Page([_item(kind, row) for row in rows[:limit]], len(rows) > limit)


def _batch(db: Connection, id: str) -> Batch:
    """Return a batch, as a transaction sees it."""
    row = db.execute(BATCH, {"b_id": id}).mappings().first()
    if row is None:
        raise NotFoundError(id)
    return _item(Batch, row)


def _change_state(db: Connection, id: str, to: State, now: int, changes: dict[str, Any]) -> Batch:
    """Move a batch to another state; return the batch as it was before."""
    batch = _batch(db, id)
    if to not in TRANSITIONS[batch.state]:
        raise StateError(f"a batch that is {batch.state} can't become {to}")
    values = {"state": to, f"{to}_at": now, **changes}
    db.execute(sa.update(BATCHES).where(BATCHES.c.id == id).values(values))
    return batch


def _add_results(db: Connection, batch: Batch, now: int) -> None:
    """Make the output and the error file of a batch files of its tenant."""
    for kind in ("output", "error"):
        if size := getattr(batch, f"{kind}_bytes"):
            file = File(
                id=getattr(batch, f"{kind}_file"),
                tenant=batch.tenant,
                filename=f"{batch.id}_{kind}.jsonl",
                purpose="batch_output",
                bytes=size,
                created_at=now,
                expires_at=now + batch.retention_s,
            )
            db.execute(sa.insert(FILES), _values(file))


def _remove_oldest(db: Connection, tenant: str, number: int) -> list[str]:
    """Forget some of the oldest ended batches of a tenant; return their files."""
    oldest = sa.select(BATCHES.c.number).where(BATCHES.c.tenant == tenant, sa.not_(IS_OPEN))
    remove = sa.delete(BATCHES).where(
        BATCHES.c.number.in_(oldest.order_by(BATCHES.c.number).limit(number).scalar_subquery())
    )
    forgotten = db.execute(remove.returning(BATCHES.c.output_file, BATCHES.c.error_file)).all()
    found: list[str] = []
    for some in slices([id for ids in forgotten for id in ids]):
        found += db.execute(sa.delete(FILES).where(FILES.c.id.in_(some)).returning(FILES.c.id)).scalars()
    return _note(db, found)


def _note(db: Connection, ids: Sequence[str]) -> list[str]:
    """Note contents that have no file, and so no plan; return their ids."""
    for some in slices(ids):
        db.execute(sa.delete(PLANS).where(PLANS.c.file.in_(some)))
    if ids:
        db.execute(_insert(db, WITHOUT_FILE).on_conflict_do_nothing(), [{"id": id} for id in ids])
    return list(ids)


def _insert(db: Connection, table: sa.Table) -> Any:
    """Return an insertion that may have a clause for an existing row."""
    return (postgresql if db.dialect.name == "postgresql" else sqlite).insert(table)


def _values(item: File | Batch) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in fields(item)}


def _item(kind: type[T], row: RowMapping) -> T:
    """Return a row as an object of its dataclass."""
    values = {field.name: row[field.name] for field in fields(kind)}  # type: ignore[arg-type]
    if "errors" in values:
        values["errors"] = tuple(values["errors"])
    return kind(**values)


def _counts(results: Sequence[Result]) -> Counts:
    """Return the numbers that results add to the columns of their batch."""
    failed = sum(one.is_error for one in results)
    unrun = sum(one.is_unrun for one in results)
    output, errors = (
        sum(len(one.text) for one in results if one.is_error == is_error) for is_error in (False, True)
    )
    tokens = together(one.tokens for one in results)
    return Counts(len(results) - failed, failed, unrun, output, errors, *tokens)
