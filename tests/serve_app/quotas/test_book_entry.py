"""Amounts of an account in the book."""

import json

from serve_app.quotas.book_entry import BookEntry
from serve_app.quotas.messages import LeaseID
from serve_app.quotas.window_totals import WindowTotals

START = 1_790_000_040
TOKENS = LeaseID("tenant t", "tokens")


def entry(granted: int, used: int, returned: int, reserved: int) -> BookEntry:
    totals = WindowTotals().of(TOKENS, START)
    return BookEntry(TOKENS, str(START), "h", tuple(totals), granted, used, returned, reserved)


def test_what_is_granted_counts_until_it_is_returned() -> None:
    assert entry(100, 30, 0, 20).counted == (100, 20, 50)
    assert entry(100, 30, 40, 20).counted == (60, 20, 10)


def test_an_answer_may_take_more_than_was_granted() -> None:
    assert entry(100, 150, 0, 0).counted == (150, 0, 0)


def test_a_holder_that_is_gone_keeps_what_it_was_charged_and_nothing_else() -> None:
    gone = entry(100, 30, 0, 20)
    gone.gone = True
    assert gone.counted == (100, 0, 0)


def test_the_saved_text_has_its_numbers_and_windows() -> None:
    one = entry(100, 30, 40, 20)
    assert json.loads(one.key) == ["account", "tenant t", "tokens", str(START), "h"]
    *numbers, closed, windows = json.loads(one.text)
    assert (numbers, closed) == ([100, 30, 40, 20], False)
    assert [span for span, _ in windows] == ["minute", "day", "month"]
    assert windows[0][1] == START
