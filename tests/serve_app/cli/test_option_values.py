"""A time on the command line is a span, a date or a time of day, in UTC unless it names a zone."""

from datetime import UTC, datetime, timedelta

import pytest

from serve_app.cli.option_values import parse_time


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("90m", timedelta(minutes=90)),
        ("24h", timedelta(hours=24)),
        ("7d", timedelta(days=7)),
        ("4w", timedelta(weeks=4)),
        ("0m", timedelta()),
    ],
)
def test_a_span_counts_back_from_now(text: str, ago: timedelta) -> None:
    before = datetime.now(UTC)
    found = parse_time(text)
    assert before - ago <= found <= datetime.now(UTC) - ago


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2026-11-01", datetime(2026, 11, 1, tzinfo=UTC)),
        ("2026-11-01T12:00", datetime(2026, 11, 1, 12, tzinfo=UTC)),
        ("2026-11-01T12:00+02:00", datetime(2026, 11, 1, 10, tzinfo=UTC)),
    ],
)
def test_a_date_is_in_utc_unless_it_says_another_zone(text: str, found: datetime) -> None:
    assert parse_time(text) == found


@pytest.mark.parametrize("text", ["", "7", "7y", "-7d", "1.5h", "yesterday", "2026-13-01", "999999w"])
def test_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a time; write 90m, 24h, 7d, 4w, or 2026-11-01"):
        parse_time(text)
