"""Files and batches as JSON of OpenAI's API."""

from collections.abc import Callable
from typing import TypeVar

from serve_app.api.protocol import JSON
from serve_app.batches.states import ENDED
from serve_app.batches.stored import Batch, File, Page

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
    """Return a batch as JSON. The ids of its result files are there once it has ended.

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
