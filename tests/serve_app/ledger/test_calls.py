"""The calls of an Engine replica: what each has taken, and the sums of all."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.ledger import calls
from serve_app.ledger.calls import FOLD, OTHER, Call, CallBook, Origin, Sums
from serve_app.ledger.rows import Outcome, Tokens

ANNA = Origin("anna's", "anna", endpoint="/v1/completions", headers=[(b"x-request-id", b"r1")])


@dataclass
class Counted:
    """A sequence of an engine."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    over: bool = False

    def tokens(self) -> Tokens:
        return Tokens(self.prompt, self.cached, self.output)

    def ended(self) -> bool:
        return self.over


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
    book = CallBook("demo", "r", "n", now=lambda: clocks.monotonic, clock=lambda: clocks.epoch)
    book.keep_ended()
    return book


def ran(book: CallBook, origin: Origin = ANNA) -> Call:
    """Return a call of one sequence that has ended."""
    call = book.open(origin)
    part = call.part()
    part.begin(Counted(2, 1, 1))
    part.end()
    call.close()
    return call


def test_a_call_has_a_row_with_its_tokens_and_times(book: CallBook, clocks: Clocks) -> None:
    call = book.open(ANNA)
    sequences = [Counted(10, 4, 3), Counted(20, 0, 5)]
    for wait_s, sequence in zip((0.5, 0.25), sequences, strict=True):
        call.part(wait_s).begin(sequence)
    clocks.monotonic += 2
    running = call.row(clocks.epoch)
    assert (running.prompt_tokens, running.cached_tokens, running.output_tokens) == (30, 4, 8)
    assert (running.outcome, running.engine_s) == ("running", 2.0)
    sequences[1].output = 9
    for part in tuple(call.parts):
        part.end()
    call.close()
    clocks.monotonic += 60
    row = call.row(0.0)
    assert (row.output_tokens, row.outcome, row.wait_s, row.engine_s) == (12, "ok", 0.5, 2.0)
    assert (row.call, row.replica, row.model) == ("n-1", "r", "demo")
    assert (row.key, row.tenant, row.endpoint, row.request_id) == ("anna's", "anna", ANNA.endpoint, "r1")


@pytest.mark.parametrize(
    ("outcomes", "closed", "worst"),
    [
        (["ok", "ok"], "ok", "ok"),
        (["ok", "cancelled"], "ok", "cancelled"),
        (["failed", "cancelled"], "ok", "failed"),
        (["ok", "ok"], "lost", "lost"),
    ],
)
def test_the_worst_outcome_of_its_parts_is_that_of_a_call(
    book: CallBook, outcomes: list[Outcome], closed: Outcome, worst: Outcome
) -> None:
    call = book.open(ANNA)
    parts = [call.part() for _ in outcomes]
    for part, outcome in zip(parts, outcomes, strict=True):
        part.begin(Counted())
        part.end(outcome)
    call.close(closed)
    assert call.row(0.0).outcome == worst


def test_a_call_ends_with_the_last_of_its_answer_and_its_parts(book: CallBook) -> None:
    call = book.open(ANNA)
    part = call.part()
    part.begin(sequence := Counted(output=1))
    call.close("cancelled")
    running, ended = book.take()
    assert (running, ended) == ([call], [])
    # The engine may make a token more before it stops.
    sequence.output = 2
    part.end()
    assert book.take() == ([], [call])
    assert call.row(0.0).output_tokens == 2
    assert book.take() == ([], [])


def test_a_call_that_gave_the_engine_nothing_leaves_no_row(book: CallBook) -> None:
    call = book.open(ANNA)
    call.part().end("cancelled")
    call.close()
    book.open(ANNA).close()
    assert (book.take(), book.by_tenant()) == (([], []), {})


def test_work_that_begins_after_the_end_is_a_call_of_its_own(book: CallBook) -> None:
    call = ran(book)
    late = call.part()
    late.begin(Counted(output=7))
    late.end()
    _, ended = book.take()
    assert [(each.origin, each.tokens().output) for each in ended] == [(ANNA, 1), (ANNA, 7)]


def test_a_sequence_of_an_ended_part_is_counted_without_a_tenant(book: CallBook) -> None:
    call = book.open(ANNA)
    part = call.part()
    part.begin(Counted(output=1))
    part.end()
    part.begin(Counted(output=2))
    call.close()
    assert {name: sums.output for name, sums in book.by_tenant().items()} == {"anna": 1, "": 2}


def test_the_sequences_of_a_part_that_have_ended_are_not_kept(book: CallBook) -> None:
    alive = 0

    class Weighed(Counted):
        def __init__(self) -> None:
            nonlocal alive
            super().__init__(output=1, over=True)
            alive += 1

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    call = book.open(ANNA)
    part = call.part()
    for _ in range(10 * FOLD):
        part.begin(Weighed())
    assert alive <= FOLD
    assert call.tokens().output == 10 * FOLD
    part.end()
    call.close()
    assert call.tokens().output == 10 * FOLD


def test_records_of_a_function_have_a_cost_and_the_time_from_their_submission(
    book: CallBook, clocks: Clocks
) -> None:
    call = book.open(ANNA)
    call.ran_records(5, 2.0)
    call.ran_records(7, 3.0)
    call.close()
    row = call.row(0.0)
    assert (row.cost, row.engine_s, row.output_tokens) == (12, 3.0, 0)
    assert book.total() == Sums(1, cost=12)


def test_calls_that_nobody_takes_are_bounded(book: CallBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ENDED", 3)
    for _ in range(5):
        ran(book)
    assert (len(book.take()[1]), book.dropped) == (3, 2)
    # The sums have them all.
    assert book.total() == Sums(5, 10, 5, 5)


def test_tenants_beyond_the_bound_share_their_sums(book: CallBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_TENANTS", 2)
    for name in "abcda":
        ran(book, Origin(tenant=name))
    running = book.open(Origin(tenant="e"))
    running.part().begin(Counted(output=1))
    found = {name: sums.output for name, sums in book.by_tenant().items()}
    assert found == {"a": 2, "b": 1, OTHER: 3}


Step = tuple[int, int, bool]
"""The number of a call, the tokens of a sequence that it begins, and whether a part of it ends."""


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.booleans()), max_size=60), st.booleans())
def test_every_token_is_counted_once_and_every_call_is_taken_once(steps: list[Step], looks: bool) -> None:
    book = CallBook("demo", name="n")
    book.keep_ended()
    opened: dict[int, Call] = {}
    given_: Counter[str] = Counter()
    taken: list[Call] = []
    for number, output, ends in steps:
        call = opened.get(number) or opened.setdefault(number, book.open(Origin(tenant=f"t{number % 2}")))
        if ends and call.parts:
            next(iter(call.parts)).end()
            if not call.parts:
                # Its answer ends with its last part; the next step is another call's.
                call.close()
                del opened[number]
        else:
            call.part().begin(Counted(output=output))
            given_[call.origin.tenant] += output
        if looks:
            running, ended = book.take()
            taken += ended
            assert not set(map(id, running)) & set(map(id, taken))
        assert {name: sums.output for name, sums in book.by_tenant().items()} == dict(given_)
    for call in opened.values():
        call.close("cancelled")
        for part in tuple(call.parts):
            part.end()
    running, ended = book.take()
    taken += ended
    assert (running, len({id(call) for call in taken})) == ([], len(taken))
    assert sum(call.tokens().output for call in taken) == given_.total() == book.total().output
