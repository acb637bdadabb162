"""Rows of a batch as they are sent, and the lines of its results."""

import pytest
from pydantic_core import from_json

from serve_app.api.protocol import JSON
from serve_app.jobs.batches import OpenBatch
from serve_app.jobs.lines import EXPIRED, answered, unrun
from serve_app.rows.rows import Row
from tests.serve_app.jobs.helpers import batch_of, row, text_of

ROW = Row(7, text_of(row("ü\n")))


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        ('{"model": "ü", "service_tier": "priority"}'.encode(), {"model": "ü", "service_tier": "flex"}),
        (b'{"n": 18446744073709551616, "body": {} }', {"n": 1 << 64, "body": {}, "service_tier": "flex"}),
        (b"{ }", {"service_tier": "flex"}),
    ],
)
def test_a_row_is_sent_as_flex_whatever_it_says(body: bytes, sent: JSON) -> None:
    line = Row(1, b'{"body": 1, "custom_id": "x", "body": %b , "url": "/"}' % body)
    assert from_json(OpenBatch(batch_of("b", "in")).body(line)) == sent


def test_a_result_is_one_line() -> None:
    result = answered("batch_1", ROW, 200, {"text": "a\nb"})
    assert (result.line, result.is_error, result.is_unrun) == (7, False, False)
    assert result.text.count(b"\n") == 1
    assert from_json(result.text)["custom_id"] == "ü\n"
    assert from_json(result.text)["id"] == "batch_req_1_7"


def test_other_statuses_are_errors() -> None:
    assert answered("batch_1", ROW, 404, {}).is_error
    assert not answered("batch_1", ROW, 201, {}).is_error
    result = unrun("batch_1", ROW, EXPIRED)
    assert (result.is_error, result.is_unrun) == (True, True)
    assert from_json(result.text)["response"] is None
