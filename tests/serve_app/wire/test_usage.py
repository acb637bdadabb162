import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.facts import Facts
from serve_app.wire.usage import RequestUsage, Tokens, Usage


class Sequence:
    """A sequence of an engine, which the test counts."""

    def __init__(self, tokens: Tokens) -> None:
        self.now = tokens
        self.over = False

    def tokens(self) -> Tokens:
        return self.now

    def ended(self) -> bool:
        return self.over


def test_the_usage_of_a_request_is_that_of_its_slots() -> None:
    usage = RequestUsage()
    usage.add(Usage(10.0, 10.5, 12.0, Tokens(3, 0, 4)))
    usage.add(Usage(9.0, 11.0, 13.0, Tokens(5, 4, 7), outcome="failed"))
    assert usage.wait_s == 2.0
    assert usage.engine_s == 4.0
    assert (usage.counted, usage.outcome, usage.ran) == (Tokens(8, 4, 11), "failed", True)


def test_the_tokens_of_a_running_slot_can_be_read_at_any_time() -> None:
    usage = RequestUsage(now=iter([1.0, 3.0, 6.0]).__next__)
    slot = usage.begin()
    slot.count(sequence := Sequence(Tokens(2, 0, 1)))
    assert (usage.total(), usage.run_s()) == (Tokens(2, 0, 1), 2.0)
    sequence.now = Tokens(2, 0, 4)
    assert usage.total().output == 4
    slot.end("cancelled")
    # What the engine counts behind the end belongs to nobody.
    sequence.now = Tokens(2, 0, 5)
    assert (usage.total().output, usage.outcome, slot.ended_at) == (4, "cancelled", 6.0)
    slot.end("failed")
    assert (usage.total().output, usage.outcome) == (4, "cancelled")


def test_sequences_that_have_ended_are_not_kept() -> None:
    alive = 0

    class Weighed(Sequence):
        def __init__(self) -> None:
            nonlocal alive
            super().__init__(Tokens(2, 1, 1))
            self.over = True
            alive += 1

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    usage = RequestUsage()
    slot = usage.begin()
    for _ in range(500):
        slot.count(Weighed())
    assert alive == 1
    assert usage.total() == Tokens(1_000, 500, 500)
    slot.end()
    assert (alive, usage.total()) == (0, Tokens(1_000, 500, 500))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "count", "grow", "over", "end", "close"]),
        st.integers(0, 9),
        st.builds(Tokens, *[st.integers(0, 5)] * 3),
    ),
    max_size=40,
)


@given(STEPS)
def test_every_token_is_counted_once_at_any_time(steps: list[tuple[str, int, Tokens]]) -> None:
    usage = RequestUsage()
    slots: list[tuple[Usage, list[Sequence]]] = []
    made, ended, closed = Tokens(), Tokens(), False
    ends: list[int] = []
    for action, which, tokens in steps:
        slot, sequences = slots[which % len(slots)] if slots else (None, [])
        running = [each for each in sequences if not each.over]
        match action:
            case "begin" if not closed:
                slots.append((usage.begin(), []))
            case "count" if slot:
                sequences.append(Sequence(tokens))
                slot.count(sequences[-1])
                made = made.plus(tokens)
            case "grow" if running:
                running[0].now = running[0].now.plus(tokens)
                made = made.plus(tokens)
            case "over" if running:
                running[0].over = True
            case "end" if slot:
                slot.end()
                slots.remove((slot, sequences))
                for each in sequences:
                    ended = ended.plus(each.now)
            case "close":
                closed = True
                usage.close(lambda: ends.append(1))
        assert (usage.total(), usage.counted) == (made, ended)
        assert len(ends) == (closed and not slots)


def test_a_request_ends_with_its_last_slot_and_begins_none_after_that() -> None:
    usage = RequestUsage()
    slot = usage.begin()
    ended: list[int] = []
    usage.close(lambda: ended.append(1))
    with pytest.raises(asyncio.CancelledError):
        usage.begin()
    assert ended == []
    slot.end()
    assert ended == [1]
    with pytest.raises(asyncio.CancelledError):
        slot.count(Sequence(Tokens()))


def test_the_totals_cross_the_relay() -> None:
    usage = RequestUsage(Tokens(3, 2, 1 << 40), 0.5, 1.5, "failed")
    assert RequestUsage.unpack(usage.pack()) == usage


@given(
    prompt=st.integers(1, 1_000),
    cached=st.integers(0, 1_000),
    width=st.integers(1, 8),
    lived=st.lists(st.integers(1, 8), min_size=1, max_size=12),
)
def test_a_beam_search_has_no_more_tokens_than_its_reservation(
    prompt: int, cached: int, width: int, lived: list[int]
) -> None:
    """A step asks the engine for a token of each beam that lives, with the text so far as the prompt."""
    usage = RequestUsage()
    slot = usage.begin()
    slot.searches = True
    beams = [min(each, width) for each in lived]
    reserved = Facts(prompt=prompt, answers=width, output=len(beams)).most(prompt + len(beams))
    for step, living in enumerate(beams):
        asked = [Sequence(Tokens(prompt + step, cached + step, 0)) for _ in range(living)]
        for each in asked:
            slot.count(each)
            each.now = each.now._replace(output=1)
        assert usage.total() == Tokens(prompt, cached, sum(beams[: step + 1]))
        assert usage.total().prompt + usage.total().output <= reserved
        for each in asked:
            each.over = True
    slot.end()
    assert usage.counted == Tokens(prompt, cached, sum(beams))
