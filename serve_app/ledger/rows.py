"""Rows of the ledger: a row for each call, without content."""

from datetime import UTC, datetime

import msgspec

from serve_app.wire.request import Source
from serve_app.wire.usage import Outcome


class LedgerRow(msgspec.Struct, kw_only=True, frozen=True):
    """One call that an Engine ran. A call that was lost with the process of its Engine has no row.

    Attributes:
        call: Id of the call in the ledger, unique.
        time: Time of its end, in UTC.
        key: Name of the API key; empty: no key.
        tenant: The tenant.
        model: Id of the model.
        adapter: Id of the adapter; empty: no adapter.
        tier: Service tier: `priority`, `default`, `flex`.
        endpoint: The route, or the method of the handle.
        source: Origin of the call.
        prompt_tokens: Tokens of prompts that the engine took.
        cached_tokens: Prompt tokens that the engine found in its prefix cache.
        output_tokens: Tokens that the engine sampled.
        cost: Cost of the records of a function; 0 for a language model.
        wait_s: Seconds in the batcher's queue; for several prompts, the longest wait.
        engine_s: Seconds from the first start of a prompt in the engine to the last end of a prompt.
        outcome: How the call ended.
        resumed: Whether the call continued a stream that broke in another Engine.
        request_id: Id of the request, the same for all calls of one request; empty: no id.
        replica: The Engine replica.
    """

    call: str
    time: datetime
    key: str = ""
    tenant: str = ""
    model: str = ""
    adapter: str = ""
    tier: str = "default"
    endpoint: str = ""
    source: Source = "http"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: int = 0
    wait_s: float = 0.0
    engine_s: float = 0.0
    outcome: Outcome = "ok"
    resumed: bool = False
    request_id: str = ""
    replica: str = ""

    @property
    def day(self) -> str:
        """The day of `time`, as YYYY-MM-DD."""
        return self.time.date().isoformat()


FIELDS = LedgerRow.__struct_fields__
"""Names of the columns, in their order."""

_encoder = msgspec.json.Encoder()


def utc(seconds: float) -> datetime:
    """Return a time of the ledger, to the millisecond.

    Args:
        seconds: Seconds since the epoch.
    """
    return datetime.fromtimestamp(round(seconds, 3), UTC)


def encode(row: LedgerRow) -> bytes:
    """Return a row as a line of JSON, with its end."""
    return _encoder.encode(row) + b"\n"
