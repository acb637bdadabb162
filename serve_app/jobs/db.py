"""Tables of files and batches.

The columns of files and batches are exactly the fields of their dataclasses in `models`.
"""

from dataclasses import fields
from typing import Any, get_args

import sqlalchemy as sa
from pydantic_core import from_json, to_json

from serve_app.api.protocol import JSON
from serve_app.jobs.models import Batch, File, State
from serve_app.rows.results import Results


class StoredText(sa.types.TypeDecorator[str]):
    """Text. PostgreSQL stores no NUL, which a client may send."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """Return a value that can be stored."""
        if value is None or dialect.name != "postgresql":
            return value
        return value.replace("\0", "\ufffd")


class StoredJSON(sa.types.TypeDecorator[Any]):
    """A value as JSON text."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str:
        """Return the JSON text of a value."""
        return to_json(value).decode()

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        """Return the value of a JSON text."""
        return None if value is None else from_json(value)


INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

TYPES: dict[Any, sa.types.TypeEngine[Any]] = {
    str: StoredText(),
    State: StoredText(),
    int: INTEGER,
    float: sa.Double(),
    bool: sa.Boolean(),
    JSON: StoredJSON(),
    tuple[JSON, ...]: StoredJSON(),
}
"""Types of columns, by the types of fields."""

VERSION = 10
"""Version of the tables; each change of the tables raises it."""

METADATA = sa.MetaData()


def _table(name: str, kind: type[Any], *indexes: sa.Index) -> sa.Table:
    """Return the table of a dataclass, whose rows have numbers in the order of their creation."""
    number = sa.Column("number", INTEGER, primary_key=True, autoincrement=True)
    columns = []
    for field in fields(kind):
        optional = type(None) in get_args(field.type)
        kept = get_args(field.type)[0] if optional else field.type
        column: sa.Column[Any] = sa.Column(
            field.name, TYPES[kept], nullable=optional, unique=field.name == "id"
        )
        columns.append(column)
    return sa.Table(name, METADATA, number, *columns, *indexes, sqlite_autoincrement=True)


FILES = _table(
    "files",
    File,
    sa.Index("files_of_tenant", "tenant", "number"),
    sa.Index("files_by_expiry", "expires_at"),
)

BATCHES = _table(
    "batches",
    Batch,
    sa.Index("batches_of_tenant", "tenant", "number"),
    sa.Index("batches_by_state", "state"),
    sa.Index("batches_by_input", "input_file"),
    sa.Index("batches_by_expiry", "expires_at"),
)

RESULTS = Results(METADATA)
"""Results of open batches."""

PLANS = sa.Table(
    "plans",
    METADATA,
    sa.Column("file", sa.Text(), primary_key=True),
    sa.Column("entries", sa.LargeBinary(), nullable=False),
    sa.Column("targets", StoredJSON(), nullable=False),
    sa.Column("errors", StoredJSON(), nullable=False),
)
"""The plan of each uploaded file; see `serve_app.jobs.plan.RowPlan`."""

WITHOUT_FILE = sa.Table("contents_without_file", METADATA, sa.Column("id", sa.Text(), primary_key=True))
"""Contents that may exist without a file: of uploads that are being added, and of files that were deleted."""
