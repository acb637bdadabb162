from datetime import UTC, datetime, timedelta

import click
import pytest
from click.testing import CliRunner

from serve_app.cli.option_values import between, moment, parsed


@click.command()
@click.option("--share", callback=parsed(between(0, 1)))
def command(share: float | None) -> None:
    click.echo(repr(share))


@pytest.mark.parametrize(("text", "value"), [("0", 0.0), ("0.25", 0.25), ("1e-3", 0.001), ("1", 1.0)])
def test_a_number_in_its_range_is_taken(text: str, value: float) -> None:
    assert between(0, 1)(text) == value


@pytest.mark.parametrize("text", ["-0.1", "1.01", "nan", "inf", "-inf", "", "half", "1,5"])
def test_another_number_is_refused_with_its_range(text: str) -> None:
    with pytest.raises(ValueError, match=r"^must be a number from 0 to 1, not "):
        between(0, 1)(text)


def test_the_option_is_named_and_may_be_left_out() -> None:
    runner = CliRunner()
    assert runner.invoke(command, []).output == "None\n"
    assert runner.invoke(command, ["--share", "0.5"]).output == "0.5\n"
    wrong = runner.invoke(command, ["--share", "2"])
    assert wrong.exit_code == 2
    assert "Invalid value for '--share': must be a number from 0 to 1, not '2'" in wrong.output


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
    found = moment(text)
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
    assert moment(text) == found


@pytest.mark.parametrize("text", ["", "7", "7y", "-7d", "1.5h", "yesterday", "2026-13-01", "999999w"])
def test_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no time; write 90m, 24h, 7d, 4w, or 2026-11-01"):
        moment(text)
