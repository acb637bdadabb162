"""Settings of the ledger, prices and quotas."""

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    model_validator,
)

from serve_app.api.scheduling import Tenant
from serve_app.settings.fields import File, Folder, FolderOrURL, Positive, Seconds, ServedId, Strict


class LedgerSettings(Strict):
    """Ledger of the calls that the engines ran."""

    folder: FolderOrURL = Field(
        description=(
            "Directory, on a volume that outlives the node, or a URL: `s3://BUCKET/PREFIX`, `gs://...`. All "
            "replicas may share it."
        )
    )
    format: Literal["parquet", "jsonl"] = Field(
        default="parquet",
        description=(
            "Format of closed files, and so of all files at a URL. A file is closed at the end of its day, "
            'at 64 MiB, or at the end of its process. "parquet" needs the extra `usage`.'
        ),
    )
    spool: Folder = Field(
        default="~/.local/state/saturate/usage",
        description="Directory in which a node keeps rows until they are at the URL.",
    )
    upload_s: Seconds = Field(default=300.0, description="Seconds after which rows are uploaded to the URL.")
    max_spool_bytes: Positive = Field(
        default=1 << 30,
        description="Maximum bytes that wait for upload; further rows are dropped and counted.",
    )
    keep_days: Positive | None = Field(
        default=None, description="Days after which files are removed from the directory; by default never."
    )


Price = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class PriceSettings(Strict):
    """Price of a model, per million tokens."""

    input: Price = Field(
        description="Price of prompts; for a function, price per million of its records' cost."
    )
    cached_input: Price | None = Field(
        default=None,
        description="Price of prompt tokens found in the prefix cache; by default the same as `input`.",
    )
    output: Price = Field(default=0.0, description="Price of answers.")
    batch_discount: Annotated[float, Field(strict=True, ge=0, le=1)] = Field(
        default=0.0, description="Share, 0 to 1, that rows of `/v1/batches` cost less."
    )


class Quota(Strict):
    """Limits of a key or of a tenant, for all replicas together. A limit left out is not enforced.

    A request counts in the calendar windows, in UTC, in which it was admitted. Its tokens are the tokens of
    its prompts and answers.
    """

    tokens_per_minute: Positive | None = Field(default=None, description="Maximum tokens in a minute.")
    tokens_per_day: Positive | None = Field(default=None, description="Maximum tokens in a day.")
    tokens_per_month: Positive | None = Field(default=None, description="Maximum tokens in a month.")
    requests_per_minute: Positive | None = Field(default=None, description="Maximum requests in a minute.")
    max_concurrency: Positive | None = Field(default=None, description="Maximum requests in flight.")


def _state_url(url: str) -> str:
    if not re.fullmatch(r"postgres(ql)?://\S+", url):
        raise ValueError(
            "must be a URL such as postgresql://USER@HOST/DATABASE; leave it out for SQLite in the folder"
        )
    return url


class QuotasSettings(Strict):
    """Quotas of keys and tenants, kept by the deployment `Quotas`. The keys file has the quotas of keys."""

    tenants: dict[Tenant, Quota] = Field(default_factory=dict, description="Quotas by the names of tenants.")
    file: File | None = Field(
        default=None,
        description=(
            "YAML or JSON file with further quotas, which override `tenants`. It is read again when it "
            "changes."
        ),
    )
    folder: Folder | None = Field(
        default=None,
        description=(
            "Directory of the state, on a volume that outlives the node; by default the folder of the "
            "batches."
        ),
    )
    database: Annotated[str, AfterValidator(_state_url)] | None = Field(
        default=None,
        description=(
            "URL of a PostgreSQL database for the state; by default the database of the batches, or SQLite "
            "in the folder."
        ),
    )
    database_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        default=None, description="Environment variable with that URL, which may hold a password."
    )
    when_away: Literal["refuse", "serve"] = Field(
        default="refuse",
        description=(
            "Treatment of requests that need the deployment while it doesn't answer: `refuse` answers 503, "
            "`serve` lets them run without limits, and charges nothing."
        ),
    )
    away_s: Seconds = Field(
        default=10.0,
        description=(
            "Seconds without an answer after which `when_away` applies; at least 15 s for the first answer. "
            "A new version of the service restarts the deployment: calls wait for it meanwhile."
        ),
    )

    @model_validator(mode="after")
    def _has_one_place(self) -> "QuotasSettings":
        if sum(place is not None for place in (self.folder, self.database, self.database_env)) > 1:
            raise ValueError("give one of folder, database and database_env")
        return self


class UsageSettings(Strict):
    """Accounting of the usage of keys and tenants."""

    quotas: QuotasSettings | None = Field(
        default=None, description="Quotas of keys and tenants; left out: no quotas."
    )
    ledger: LedgerSettings | None = Field(
        default=None, description="A row for each call that an engine ran; left out: no ledger."
    )
    prices: dict[ServedId, PriceSettings] = Field(
        default_factory=dict,
        description=(
            "Prices by the ids of models and adapters, for `saturate usage`. An adapter without a price has "
            "its model's price."
        ),
    )
    currency: Annotated[str, Field(min_length=1, max_length=16)] = Field(
        default="USD", description="Currency of the prices."
    )


NO_USAGE = UsageSettings()
