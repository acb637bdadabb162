"""The form of a row."""

from datetime import UTC, datetime

import msgspec

from serve_app.ledger.rows import LedgerRow, encode


def test_a_row_is_a_line_of_json_that_reads_back() -> None:
    row = LedgerRow(call="a-1", time=datetime.now(UTC), tenant="é\n\r", request_id='"', output_tokens=3)
    line = encode(row)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert msgspec.json.decode(line, type=LedgerRow) == row


def test_a_row_has_no_place_for_content() -> None:
    assert set(LedgerRow.__struct_fields__) == {
        *("call", "time", "key", "tenant", "model", "adapter", "tier", "endpoint", "source"),
        *("prompt_tokens", "cached_tokens", "output_tokens", "cost", "wait_s", "engine_s"),
        *("outcome", "resumed", "request_id", "replica"),
    }
