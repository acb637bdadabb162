"""The calls of an Engine replica: a row for each, and the sums of all."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.ledger import calls
from serve_app.ledger.calls import OTHER, Call, CallBook, Sums
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import Outcome, RequestUsage, Tokens, Usage
from tests.serve_app.ledger.crashing import FakeSequence, begun, request_of, total

ANNA = request_of("anna", key="anna's", headers=[(b"x-request-id", b"r1")], body=b"text")


class Clocks:
    """The time, which the test sets."""

    def __init__(self) -> None:
        self.monotonic = 100.0
        self.epoch = 1_000_000_000.0


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def book(clocks: Clocks) -> CallBook:
    book = CallBook("demo", "r", "n", clock=lambda: clocks.epoch)
    book.keep_ended()
    return book


def ran(book: CallBook, request: RelayRequest = ANNA) -> Call:
    """Return a call of one sequence that has ended."""
    call = book.open(request, RequestUsage())
    begun(call, FakeSequence(Tokens(2, 1, 1))).end()
    call.close()
    return call


def test_a_call_has_a_row_with_its_tokens_and_times(book: CallBook, clocks: Clocks) -> None:
    call = book.open(ANNA, RequestUsage(now=lambda: clocks.monotonic))
    sequences = [FakeSequence(Tokens(10, 4, 3)), FakeSequence(Tokens(20, 0, 5))]
    slots = []
    for wait_s, sequence in zip((0.5, 0.25), sequences, strict=True):
        slot = call.usage.begin(Usage(clocks.monotonic - wait_s, clocks.monotonic, 0.0))
        slot.count(sequence)
        slots.append(slot)
    clocks.monotonic += 2
    assert call.usage.total() == (30, 4, 8)
    sequences[1].now = Tokens(20, 0, 9)
    for slot in slots:
        slot.end()
    call.close()
    clocks.monotonic += 60
    (kept,) = book.take()
    assert kept.request.body == b"", "a call that waits for its row holds no body"
    row = kept.row()
    assert (row.output_tokens, row.outcome, row.wait_s, row.engine_s) == (12, "ok", 0.5, 2.0)
    assert (row.call, row.replica, row.model) == ("n-1", "r", "demo")
    assert (row.key, row.tenant, row.endpoint, row.request_id) == ("anna's", "anna", ANNA.path, "r1")


@pytest.mark.parametrize(
    ("outcomes", "closed", "worst"),
    [
        (["ok", "ok"], "ok", "ok"),
        (["ok", "cancelled"], "ok", "cancelled"),
        (["failed", "cancelled"], "ok", "failed"),
        (["ok", "ok"], "lost", "lost"),
    ],
)
def test_the_worst_outcome_of_its_slots_is_that_of_a_call(
    book: CallBook, outcomes: list[Outcome], closed: Outcome, worst: Outcome
) -> None:
    call = book.open(ANNA, RequestUsage())
    slots = [begun(call, FakeSequence()) for _ in outcomes]
    for slot, outcome in zip(slots, outcomes, strict=True):
        slot.end(outcome)
    call.close(closed)
    assert call.row().outcome == worst


def test_a_call_ends_with_the_last_of_its_answer_and_its_slots(book: CallBook) -> None:
    call = book.open(ANNA, RequestUsage())
    sequence = FakeSequence(Tokens(output=1))
    slot = begun(call, sequence)
    call.close("cancelled")
    assert book.take() == []
    # The engine may make a token more before it stops.
    sequence.now = Tokens(output=2)
    slot.end()
    call.close()
    assert book.take() == [call]
    assert (call.row().output_tokens, call.row().outcome) == (2, "cancelled")
    assert book.take() == []


def test_a_call_that_gave_the_engine_nothing_leaves_no_row(book: CallBook) -> None:
    call = book.open(ANNA, RequestUsage())
    call.usage.begin().end("cancelled")
    assert (book.take(), book.by_tenant()) == ([], {})
    call.close()
    with book.open(ANNA, RequestUsage()):
        pass
    assert (book.take(), book.by_tenant()) == ([], {})


def test_records_of_a_function_have_a_cost_and_the_time_from_their_submission(book: CallBook) -> None:
    with book.open(ANNA, RequestUsage()) as call:
        call.usage.add(Usage(100.0, 100.0, 103.0, cost=12))
    row = call.row()
    assert (row.cost, row.engine_s, row.output_tokens) == (12, 3.0, 0)
    assert total(book) == Sums(1, cost=12)


def test_calls_that_nobody_takes_are_bounded(book: CallBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ENDED", 3)
    for _ in range(5):
        ran(book)
    assert (len(book.take()), book.dropped) == (3, 2)
    # The sums have them all.
    assert total(book) == Sums(5, 10, 5, 5)


def test_tenants_beyond_the_bound_share_their_sums(book: CallBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_TENANTS", 2)
    for name in "abcda":
        ran(book, request_of(name))
    begun(book.open(request_of("e"), RequestUsage()), FakeSequence(Tokens(output=1)))
    found = {name: sums.output for name, sums in book.by_tenant().items()}
    assert found == {"a": 2, "b": 1, OTHER: 3}


class Booked:
    """A reservation that notes what it is told."""

    def __init__(self, tokens: int = 10) -> None:
        self.tokens = tokens
        self.told: list[object] = []

    def settle(self, tokens: int, *, request: bool) -> None:
        self.told.append((tokens, request))


def test_the_end_of_a_call_settles_its_reservation_once_with_the_tokens_of_its_row() -> None:
    book, booked, idle = CallBook("demo"), Booked(), Booked()
    book.keep_ended()
    call = book.open(ANNA, RequestUsage())
    call.reservations.append(booked)
    slot = begun(call, FakeSequence(Tokens(2, 1, 5)))
    call.close("cancelled")
    assert booked.told == []
    slot.end()
    call.close()
    assert booked.told == [(7, True)]
    with book.open(ANNA, RequestUsage()) as empty:
        empty.reservations.append(idle)
    assert idle.told == [(0, False)]


@pytest.mark.parametrize(("used", "charges"), [(3, (0, 3)), (7, (3, 4)), (20, (16, 4))])
def test_a_second_reservation_is_charged_first_and_both_together_what_the_call_used(
    used: int, charges: tuple[int, int]
) -> None:
    book, booked = CallBook("demo"), [Booked(10), Booked(4)]
    call = book.open(ANNA, RequestUsage())
    call.reservations += booked
    slot = begun(call, FakeSequence(Tokens(used)))
    slot.end()
    call.close()
    assert [each.told for each in booked] == [[(charge, True)] for charge in charges]


Step = tuple[int, int, bool]
"""The number of a call, the tokens of a sequence that it begins, and whether a slot of it ends."""


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.booleans()), max_size=60), st.booleans())
def test_every_token_is_counted_once_and_every_call_is_taken_once(steps: list[Step], looks: bool) -> None:
    book = CallBook("demo", name="n")
    book.keep_ended()
    opened: dict[int, tuple[Call, list[Usage]]] = {}
    given_: Counter[str] = Counter()
    taken: list[Call] = []
    for number, output, ends in steps:
        if number not in opened:
            opened[number] = book.open(request_of(f"t{number % 2}"), RequestUsage()), []
        call, slots = opened[number]
        if ends and slots:
            slots.pop().end()
            if not slots:
                # Its answer ends with its last slot; the next step is another call's.
                call.close()
                del opened[number]
        else:
            slots.append(begun(call, FakeSequence(Tokens(output=output))))
            given_[call.request.scheduling.tenant] += output
        if looks:
            taken += book.take()
        assert {name: sums.output for name, sums in book.by_tenant().items()} == dict(given_)
    for call, slots in opened.values():
        call.close("cancelled")
        for slot in slots:
            slot.end()
    taken += book.take()
    assert len({id(call) for call in taken}) == len(taken)
    assert sum(call.usage.total().output for call in taken) == given_.total() == total(book).output
