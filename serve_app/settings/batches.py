"""Settings of files and batches."""

import re
from typing import Annotated

from pydantic import (
    AfterValidator,
    Field,
    model_validator,
)

from serve_app.settings.fields import Folder, FolderOrURL, Positive, Strict

DAY_S = 86_400


def _database(url: str) -> str:
    if not re.fullmatch(r"postgres(ql)?://\S+", url):
        raise ValueError(
            "must be a URL such as postgresql://USER@HOST/DATABASE; leave it out for SQLite in the folder"
        )
    return url


class BatchesSettings(Strict):
    """Files and batches of OpenAI's API, in their own deployment, `Batches`."""

    folder: Folder = Field(
        description=(
            "Directory of the state and the contents, on a volume that outlives the node; it is created if "
            "missing. Only one service may use it at a time."
        )
    )
    content: FolderOrURL | None = Field(
        default=None,
        description=(
            "Directory or URL of the contents, in place of the folder: `s3://BUCKET/PREFIX`, `gs://...`."
        ),
    )
    database: Annotated[str, AfterValidator(_database)] | None = Field(
        default=None,
        description="URL of a PostgreSQL database for the state, in place of SQLite in the folder.",
    )
    database_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        default=None, description="Environment variable with that URL, which may hold a password."
    )
    max_file_bytes: Positive = Field(default=200 << 20, description="Largest upload.")
    max_tenant_bytes: Positive = Field(
        default=20 << 30, description="Maximum bytes of all uploads of a tenant."
    )
    max_files: Positive = Field(default=10_000, description="Maximum uploads of a tenant.")
    max_lines: Positive = Field(default=50_000, description="Maximum rows of a batch.")
    max_line_bytes: Positive = Field(default=4 << 20, description="Maximum bytes of a row.")
    max_open_batches: Positive = Field(
        default=100, description="Maximum batches of a tenant that haven't ended."
    )
    max_batches: Positive = Field(
        default=10_000,
        description=(
            "Maximum batches of a tenant; for a new batch the oldest ended batch is deleted with its results."
        ),
    )
    retention_s: Annotated[int, Field(strict=True, ge=3600)] = Field(
        default=30 * DAY_S,
        description=(
            "Seconds after which a file is deleted, unless its upload states a time. A batch is deleted as "
            "many seconds after the end of its window."
        ),
    )
    max_result_bytes: Positive = Field(
        default=100 << 30,
        description="Maximum bytes of all result files of a tenant; beyond it the oldest files are deleted.",
    )
    max_rows_in_flight: Positive = Field(
        default=1024, description="Maximum rows at the engines of one model at once."
    )

    @model_validator(mode="after")
    def _agree_with_each_other(self) -> "BatchesSettings":
        if self.database and self.database_env:
            raise ValueError("give database or database_env, not both")
        if self.max_line_bytes > self.max_file_bytes:
            raise ValueError(
                f"max_line_bytes: must be at most max_file_bytes, which is {self.max_file_bytes}"
            )
        if self.max_file_bytes > self.max_tenant_bytes:
            raise ValueError(
                f"max_file_bytes: must be at most max_tenant_bytes, which is {self.max_tenant_bytes}"
            )
        if self.max_open_batches > self.max_batches:
            raise ValueError(f"max_open_batches: must be at most max_batches, which is {self.max_batches}")
        return self


class BatchLimits(Strict):
    """Limits of an API key on files and batches, in place of the limits in `BatchesSettings`."""

    max_file_bytes: Positive | None = Field(default=None, description="Largest upload.")
    max_tenant_bytes: Positive | None = Field(
        default=None,
        description="Maximum bytes of all uploads of its tenant, checked when the key adds an upload.",
    )
    max_lines: Positive | None = Field(default=None, description="Maximum rows of a batch.")
    max_open_batches: Positive | None = Field(
        default=None,
        description="Maximum batches of its tenant that haven't ended, checked when the key creates a batch.",
    )
