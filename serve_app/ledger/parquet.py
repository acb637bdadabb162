"""Closed segments as Parquet."""

import io
from typing import Any

from serve_app.ledger.rows import FIELDS
from serve_app.system.distribution import extra

NEEDS = f"Parquet needs pyarrow: {extra('usage')}"

INTEGERS = {"prompt_tokens", "cached_tokens", "output_tokens", "cost"}
SECONDS = {"wait_s", "engine_s"}


def schema() -> Any:
    """Return the Arrow schema of the rows."""
    import pyarrow as pa

    def type_of(name: str) -> Any:
        if name == "time":
            return pa.timestamp("us", "UTC")
        if name in INTEGERS:
            return pa.int64()
        if name in SECONDS:
            return pa.float64()
        return pa.bool_() if name == "resumed" else pa.string()

    return pa.schema([(name, type_of(name)) for name in FIELDS])


def to_parquet(lines: bytes) -> bytes:
    """Return a segment as Parquet.

    Args:
        lines: Its rows as JSON lines; an incomplete last line is left out.

    Raises:
        ValueError: A line isn't a row.
    """
    import pyarrow as pa
    import pyarrow.json
    import pyarrow.parquet

    whole = lines[: lines.rfind(b"\n") + 1]
    if whole:
        # One thread, since the process serves requests.
        table = pyarrow.json.read_json(
            io.BytesIO(whole),
            pyarrow.json.ReadOptions(use_threads=False),
            pyarrow.json.ParseOptions(explicit_schema=schema(), unexpected_field_behavior="ignore"),
        )
    else:
        table = schema().empty_table()
    out = io.BytesIO()
    pa.parquet.write_table(table, out)
    return out.getvalue()
