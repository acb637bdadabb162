"""Limits on files and batches."""

from dataclasses import dataclass

from serve_app.settings.batches import BatchesSettings

DAY_S = 86_400

MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * DAY_S
"""Bounds of the time after which a file is deleted, where a request says so."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on files and batches.

    Attributes:
        max_file_bytes: Most bytes of an uploaded file.
        max_tenant_bytes: Most bytes of all uploaded files of a tenant.
        max_files: Most uploaded files of a tenant.
        max_lines: Most rows of a batch.
        max_line_bytes: Most bytes of a row.
        max_open_batches: Most batches of a tenant that haven't ended.
        max_batches: Most batches of a tenant, of which the oldest that ended are deleted for new ones.
        max_errors: Most errors of a batch's validation.
        min_window_s: Shortest completion window, in seconds.
        max_window_s: Longest completion window, in seconds.
        retention_s: Seconds after which a file is deleted, if its upload says nothing, and a batch, from the
            end of its window on.
        max_result_bytes: Most bytes of all result files of a tenant.
    """

    max_file_bytes: int = 200 << 20
    max_tenant_bytes: int = 20 << 30
    max_files: int = 10_000
    max_lines: int = 50_000
    max_line_bytes: int = 4 << 20
    max_open_batches: int = 100
    max_batches: int = 10_000
    max_errors: int = 100
    min_window_s: int = 3600
    max_window_s: int = 7 * DAY_S
    retention_s: int = 30 * DAY_S
    max_result_bytes: int = 100 << 30

    @classmethod
    def of(cls, settings: BatchesSettings) -> "Limits":
        """Return the limits of a config."""
        return cls(
            max_file_bytes=settings.max_file_bytes,
            max_tenant_bytes=settings.max_tenant_bytes,
            max_files=settings.max_files,
            max_lines=settings.max_lines,
            max_line_bytes=settings.max_line_bytes,
            max_open_batches=settings.max_open_batches,
            max_batches=settings.max_batches,
            retention_s=settings.retention_s,
            max_result_bytes=settings.max_result_bytes,
        )
