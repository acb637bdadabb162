"""A segment of the ledger has the same rows in JSON Lines and in Parquet."""

import io
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.ledger.parquet import to_parquet
from serve_app.ledger.rows import LedgerRow, encode

COUNTS = st.integers(0, 2**53)
SECONDS = st.floats(0, 1e9)
TEXTS = st.text(max_size=20)
ROWS = st.builds(
    LedgerRow,
    call=TEXTS,
    time=st.datetimes(datetime(1970, 1, 1), timezones=st.just(UTC)),
    key=TEXTS,
    tenant=TEXTS,
    prompt_tokens=COUNTS,
    cached_tokens=COUNTS,
    output_tokens=COUNTS,
    cost=COUNTS,
    wait_s=SECONDS,
    engine_s=SECONDS,
    resumed=st.booleans(),
    request_id=TEXTS,
)


def table(data: bytes) -> Any:
    return pq.read_table(io.BytesIO(data))


@given(rows=st.lists(ROWS, max_size=5), rest=st.sampled_from([b"", b'{"call":"a-9","ti']))
def test_a_segment_has_the_same_rows_in_both_forms(rows: list[LedgerRow], rest: bytes) -> None:
    """A crash may leave a part of a line at the end, which is no row."""
    found = table(to_parquet(b"".join(map(encode, rows)) + rest)).to_pylist()
    assert found == [msgspec.structs.asdict(row) for row in rows]


LINE = encode(LedgerRow(call="a", time=datetime.now(UTC)))


def test_a_segment_without_rows_has_the_columns_of_all_others() -> None:
    found = table(to_parquet(b""))
    assert found.num_rows == 0
    assert found.schema.names == list(LedgerRow.__struct_fields__)
    assert found.schema == table(to_parquet(LINE)).schema
    assert found.schema.field("time").type == pa.timestamp("us", "UTC")


def test_a_column_of_a_later_version_is_left_out() -> None:
    later = LINE.replace(b"{", b'{"colour":"red",', 1)
    assert table(to_parquet(later)) == table(to_parquet(LINE))


@pytest.mark.parametrize("line", [b"no\n", b'{"call": 5\n', b'{"call":"a","cost":"many"}\n'])
def test_a_line_that_is_no_row_is_an_error(line: bytes) -> None:
    with pytest.raises(ValueError, match="JSON parse error"):
        to_parquet(line)
