"""Totals of windows: one at a time for each length, and all of them saved."""

import json

from serve_app.quotas.messages import LeaseID
from serve_app.quotas.window_totals import WindowTotals

START = 1_790_000_040
TOKENS = LeaseID("tenant t", "tokens")
SLOTS = LeaseID("tenant t", "slots")


def test_tokens_count_in_each_length_of_window_and_slots_in_one_without_end() -> None:
    totals = WindowTotals()
    assert [total.span for total in totals.of(TOKENS, START)] == ["minute", "day", "month"]
    (slots,) = totals.of(SLOTS, START)
    assert (slots.span, slots.left_s(START)) == (None, 0.0)
    assert totals.at(TOKENS, "minute", START + 20).left_s(START + 20) == 40.0


def test_a_new_window_begins_with_nothing_and_the_longer_ones_last() -> None:
    totals = WindowTotals()
    totals.add(TOKENS, totals.of(TOKENS, START), 100, 20, 5)
    minute, day, _ = totals.of(TOKENS, START + 60)
    assert (minute.charged, minute.reserved, minute.free) == (0, 0, 0)
    assert (day.charged, day.reserved, day.free) == (100, 20, 5)
    assert totals.since(TOKENS, "minute", START) is None
    assert totals.since(TOKENS, "minute", START + 60) is minute


def test_totals_that_are_restored_have_what_was_charged() -> None:
    totals = WindowTotals()
    for lease, amount in ((TOKENS, 100), (SLOTS, 2)):
        totals.add(lease, totals.of(lease, START), amount, 1, 1)
    changes = totals.take_changes()
    assert len(changes) == 4
    assert totals.take_changes() == {}
    again = WindowTotals()
    for key, value in changes.items():
        kind, subject, thing, span = json.loads(key)
        assert kind == "sum"
        assert value is not None
        again.restore(LeaseID(subject, thing), span, value)
    assert [total.charged for total in again.of(TOKENS, START)] == [100, 100, 100]
    (slots,) = again.of(SLOTS, START)
    assert (slots.charged, slots.reserved, slots.span) == (2, 0, None)


def test_a_window_that_is_over_is_deleted_unless_the_next_one_has_its_key() -> None:
    totals = WindowTotals()
    totals.add(TOKENS, totals.of(TOKENS, START), 100, 0, 0)
    minute = next(key for key in totals.take_changes() if "minute" in key)
    totals.sweep(START + 60)
    assert totals.take_changes() == {minute: None}
    totals.add(TOKENS, totals.of(TOKENS, START + 60), 1, 0, 0)
    totals.sweep(START + 120)
    totals.add(TOKENS, totals.of(TOKENS, START + 120), 7, 0, 0)
    assert totals.take_changes()[minute] == json.dumps([START + 120, 7])
