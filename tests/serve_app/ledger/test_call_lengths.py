"""Lengths of calls in a ledger."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.ledger import call_lengths
from serve_app.ledger.call_lengths import CallLengths
from serve_app.ledger.disk import LocalDisk
from serve_app.ledger.reading import read
from serve_app.ledger.rows import Row, utc
from serve_app.relay.usage import Tokens
from tests.serve_app.ledger.ledgers import START, save


def row(number: int, **fields: Any) -> Row:
    given: dict[str, Any] = {"time": utc(START), "model": "m", "endpoint": "/v1/chat/completions"}
    return Row(call=f"a-{number}", **(given | {"prompt_tokens": number, "output_tokens": 1} | fields))


ROWS = [
    row(10, cached_tokens=4, output_tokens=3),
    row(11, source="handle", endpoint="call", adapter="m:a"),
    row(12, source="batch"),
    row(13, source="warm_up"),
    row(14, outcome="cancelled"),
    row(15, endpoint="/generate"),
    row(16, output_tokens=0),
    row(17, time=utc(START - 3600)),
    row(18, model="n"),
]


@pytest.mark.parametrize("parquet", [False, True])
def test_answered_live_calls_are_taken_with_their_tokens(tmp_path: Path, parquet: bool) -> None:
    save(tmp_path, "2027-01-15", "a.00000", ROWS, parquet=parquet)
    found = read(LocalDisk(), tmp_path, CallLengths(utc(START)))
    assert found.models == ["m", "m:a", "n"]
    assert found.of("m") == [Tokens(10, 4, 3)]
    assert found.of("m:a") == [Tokens(11, 0, 1)]
    assert not found.of("x")


def test_days_before_the_time_are_not_read() -> None:
    lengths = CallLengths(utc(START))
    assert lengths.wants("2027-01-15")
    assert not lengths.wants("2027-01-14")
    assert CallLengths().wants("2027-01-14")


def test_each_call_is_as_likely_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_lengths, "MOST", 100)
    lengths = CallLengths()
    lengths.add(row(number) for number in range(1, 2001))
    kept = [call.prompt for call in lengths.of("m")]
    assert len(set(kept)) == len(kept) == 100
    assert 800 < sum(kept) / len(kept) < 1200
