"""Errors of stored files and batches."""

from serve_app.rows.errors import RunError


class StoreError(Exception):
    """The place of the batches can't be used as it is; the message says what to change."""


class NotFoundError(Exception):
    """A tenant has no such file or batch."""


class InUseError(Exception):
    """A file can't be deleted, since an open batch reads it."""


class TooManyError(Exception):
    """A tenant has reached a limit."""


class StateError(Exception):
    """A batch can't change from its state to the requested state."""


class ContentLostError(RunError):
    """A content or a plan that a batch needs is missing, or has changed."""
