"""The form of a row."""

import time

from serve_app.ledger.rows import FIELDS, LedgerRow, decode, encode, utc


def test_a_row_is_a_line_of_json_that_reads_back() -> None:
    row = LedgerRow(call="a-1", time=utc(1_800_000_000.0), tenant="é\n\r", request_id='"', output_tokens=3)
    line = encode(row)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == ([row], 0)


def test_an_unfinished_last_line_is_left_out_and_a_wrong_line_counted() -> None:
    line = encode(LedgerRow(call="a-1", time=utc(time.time())))
    rows, wrong = decode(line + b'{"call": 1}\n' + line + line[:-1])
    assert (len(rows), wrong) == (2, 1)


def test_a_row_of_a_later_version_can_be_read() -> None:
    line = encode(LedgerRow(call="a-1", time=utc(0))).replace(b"{", b'{"new":1,', 1)
    assert decode(line)[1] == 0


def test_a_row_has_no_place_for_content() -> None:
    assert set(FIELDS) == {
        *("call", "time", "key", "tenant", "model", "adapter", "tier", "endpoint", "source"),
        *("prompt_tokens", "cached_tokens", "output_tokens", "cost", "wait_s", "engine_s"),
        *("outcome", "resumed", "request_id", "replica"),
    }
    assert LedgerRow(call="a-1", time=utc(86_399.9996)).day == "1970-01-02"
