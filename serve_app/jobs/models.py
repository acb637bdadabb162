"""Files and batches: their states, how they are stored, and their JSON in OpenAI's API."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

from serve_app.api.protocol import JSON

State = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]

TRANSITIONS: dict[State, frozenset[State]] = {
    "validating": frozenset({"in_progress", "cancelling", "failed"}),
    "in_progress": frozenset({"finalizing", "cancelling", "failed"}),
    "finalizing": frozenset({"completed", "expired", "failed"}),
    "cancelling": frozenset({"cancelled", "failed"}),
    "completed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
    "failed": frozenset(),
}
"""The states that may follow each state. A batch can fail late only if its content is lost."""

STATES: tuple[State, ...] = get_args(State)

MIN_WINDOW_S, MAX_WINDOW_S = 3600, 7 * 86_400
"""Bounds of a completion window, in seconds."""

ENDED = frozenset(state for state in STATES if not TRANSITIONS[state])
"""Final states."""

OPEN = tuple(state for state in STATES if state not in ENDED)
"""States that aren't final."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A stored file. Times are in seconds since the epoch."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None
    status: str = "processed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch.

    Attributes:
        weight: The tenant's share relative to other tenants; None: not stated.
        output_file: Id of the output; the file exists once the batch has ended, if a row succeeded.
        error_file: Id of the error file; the file exists once the batch has ended, if a row failed.
        retention_s: Seconds after which the output and the error file are deleted.
        model: The one model that the rows name; None: they aren't validated, or name several models or none.
        errors: Errors of the batch as a whole.
        total: Number of rows; 0 until they are validated.
        completed: Rows in the output.
        failed: Rows in the error file.
        unrun: Failed rows that were not run, since the batch expired or was cancelled.
        input_tokens: Tokens that the answers report, as the three fields below; see `RowTokens`.
        output_bytes: Length of the output, which is written at the end of the batch.
        error_bytes: Length of the error file.
        created_at: Time in seconds since the epoch, like all `_at` fields.
        expires_at: The deadline: a row without an answer by then gets an error.
        api_key: Name of the API key that created the batch; empty: no key.
        rights: The key's rights at the creation of the batch, see `KeyRules.rights`; empty: the rights that
            the key has now.
    """

    id: str
    tenant: str
    endpoint: str
    input_file: str
    output_file: str
    error_file: str
    completion_window: str
    metadata: JSON
    retention_s: int
    created_at: int
    expires_at: int
    state: State = "validating"
    model: str | None = None
    errors: tuple[JSON, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    unrun: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    weight: float | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    api_key: str = ""
    rights: JSON = field(default_factory=dict)


class Counts(NamedTuple):
    """The addition of a group of finished rows to its batch, by column."""

    completed: int
    failed: int
    unrun: int
    output_bytes: int
    error_bytes: int
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class Summary(NamedTuple):
    """Totals of the open batches and of the stored files.

    Attributes:
        batches: Open batches by state.
        rows: Rows of the open batches without a result.
        oldest: Creation time of the oldest open batch; None: no batch is open.
        files: Stored files.
        bytes: Bytes of the stored files.
    """

    batches: dict[str, int]
    rows: int
    oldest: int | None
    files: int
    bytes: int


class Page(NamedTuple, Generic[T]):
    """A part of a list, and whether more follows."""

    items: list[T]
    has_more: bool


ItemT = TypeVar("ItemT", File, Batch)

TIMES = (
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def file_object(file: File) -> JSON:
    """Return a file as JSON."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": file.status,
        "status_details": None,
    }


def batch_object(batch: Batch, warning: str | None = None) -> JSON:
    """Return a batch as JSON. The ids of its result files are set once the batch has ended.

    Args:
        batch: The batch.
        warning: A message for `warnings`, a field that OpenAI's API doesn't have.
    """
    ended = batch.state in ENDED
    errors = {"object": "list", "data": list(batch.errors)} if batch.errors else None
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": errors,
        "input_file_id": batch.input_file,
        "completion_window": batch.completion_window,
        "status": batch.state,
        "output_file_id": batch.output_file if ended and batch.output_bytes else None,
        "error_file_id": batch.error_file if ended and batch.error_bytes else None,
        **{name: getattr(batch, name) for name in TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": batch.metadata or None,
        **({"warnings": [warning]} if warning and not ended else {}),
    }


def list_object(page: Page[ItemT], as_json: Callable[[ItemT], JSON]) -> JSON:
    """Return a page as JSON."""
    ids = [item.id for item in page.items]
    return {
        "object": "list",
        "data": [as_json(item) for item in page.items],
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": page.has_more,
    }
