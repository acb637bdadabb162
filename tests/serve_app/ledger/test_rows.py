"""The form of a row."""

import msgspec

from serve_app.ledger.rows import FIELDS, LedgerRow, encode, utc


def test_a_row_is_a_line_of_json_that_reads_back() -> None:
    row = LedgerRow(call="a-1", time=utc(1_800_000_000.0), tenant="é\n\r", request_id='"', output_tokens=3)
    line = encode(row)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert msgspec.json.decode(line, type=LedgerRow) == row


def test_a_row_has_no_place_for_content() -> None:
    assert set(FIELDS) == {
        *("call", "time", "key", "tenant", "model", "adapter", "tier", "endpoint", "source"),
        *("prompt_tokens", "cached_tokens", "output_tokens", "cost", "wait_s", "engine_s"),
        *("outcome", "resumed", "request_id", "replica"),
    }
    assert LedgerRow(call="a-1", time=utc(86_399.9996)).day == "1970-01-02"
