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
    """Ledger of the calls that the engines ran.

    Attributes:
        folder: Directory, on a volume that outlives the node, or a URL: `s3://BUCKET/PREFIX`, `gs://...`.
            All replicas may have the same.
        format: Form of the files of days that are over, and of all files at a URL; "parquet" needs the extra
            `usage`.
        spool: Directory in which a node keeps rows until they are at the URL.
        upload_s: Seconds after which rows are uploaded to the URL.
        max_spool_bytes: Most bytes that wait for their upload; beyond it rows are dropped, and counted.
        keep_days: Days after which files are removed from the directory; by default never.
    """

    folder: FolderOrURL
    format: Literal["parquet", "jsonl"] = "parquet"
    spool: Folder = "~/.local/state/saturate/usage"
    upload_s: Seconds = 300.0
    max_spool_bytes: Positive = 1 << 30
    keep_days: Positive | None = None


Price = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class PriceSettings(Strict):
    """Price of a model, per million tokens.

    Attributes:
        input: Of prompts; of a function, per million of its records' cost.
        cached_input: Of prompt tokens that are found in the prefix cache; by default as `input`.
        output: Of answers.
        batch_discount: Share, 0 to 1, that rows of `/v1/batches` cost less.
    """

    input: Price
    cached_input: Price | None = None
    output: Price = 0.0
    batch_discount: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0


class Quota(Strict):
    """Limits of a key or of a tenant, for all replicas together. A limit left out doesn't exist.

    A request counts in the windows of the calendar, in UTC, in which it was admitted. Its tokens are those of
    its prompts and of its answers.

    Attributes:
        tokens_per_minute: Most tokens in a minute.
        tokens_per_day: Most tokens in a day.
        tokens_per_month: Most tokens in a month.
        requests_per_minute: Most requests in a minute.
        max_concurrency: Most requests in flight.
    """

    tokens_per_minute: Positive | None = None
    tokens_per_day: Positive | None = None
    tokens_per_month: Positive | None = None
    requests_per_minute: Positive | None = None
    max_concurrency: Positive | None = None


def _state_url(url: str) -> str:
    if not re.fullmatch(r"(postgres(ql)?|rediss?)://\S+", url):
        raise ValueError(
            "must be a URL such as postgresql://USER@HOST/DATABASE or redis://HOST:6379/0; leave it out for "
            "SQLite in the folder"
        )
    return url


class QuotasSettings(Strict):
    """Quotas of keys and tenants, kept by the deployment `Quotas`. Those of keys are in their file.

    Attributes:
        tenants: Quotas by the names of tenants.
        file: YAML or JSON file with more of them, which go before those of `tenants`. It is read again when
            it changes.
        folder: Directory of the state, on a volume that outlives the node; by default that of the batches.
        database: URL of a PostgreSQL or Redis database for the state; by default that of the batches, or
            SQLite in the folder.
        database_env: Environment variable with that URL, which may hold a password.
        when_away: Treatment of requests that need the deployment while it doesn't answer: `fail_closed`
            answers 503, `fail_open` lets them go on, and charges them once it is back.
        away_s: Seconds without an answer after which that begins; for the first answer it is 15 s or more.
    """

    tenants: dict[Tenant, Quota] = Field(default_factory=dict)
    file: File | None = None
    folder: Folder | None = None
    database: Annotated[str, AfterValidator(_state_url)] | None = None
    database_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    when_away: Literal["fail_closed", "fail_open"] = "fail_closed"
    away_s: Seconds = 2.0

    @model_validator(mode="after")
    def _has_one_place(self) -> "QuotasSettings":
        if sum(place is not None for place in (self.folder, self.database, self.database_env)) > 1:
            raise ValueError("give one of folder, database and database_env")
        return self


class UsageSettings(Strict):
    """Accounting of what keys and tenants use.

    Attributes:
        quotas: Quotas of keys and tenants; left out: there are none.
        ledger: A row for each call that an engine ran; left out: none are written.
        prices: Prices by the ids of models and adapters, for `saturate usage`. An adapter without a price has
            that of its model.
        currency: Currency of the prices.
    """

    quotas: QuotasSettings | None = None
    ledger: LedgerSettings | None = None
    prices: dict[ServedId, PriceSettings] = Field(default_factory=dict)
    currency: Annotated[str, Field(min_length=1, max_length=16)] = "USD"


NO_USAGE = UsageSettings()
