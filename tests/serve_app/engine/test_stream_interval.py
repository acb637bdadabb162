import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.stream_interval import LONGEST_S, PieceRate, StreamInterval


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pieces_of(streams: int, step_s: float, steps: int) -> list[list[float]]:
    """Return the times of the pieces of each stream, which vLLM asks for as it does in a RequestState."""
    clock = Clock()
    rate = PieceRate(1_000.0, clock)
    rate.streams = streams
    intervals = [StreamInterval(rate) for _ in range(streams)]
    assert all(interval > 1 for interval in intervals)
    unsent = [0] * streams
    pieces: list[list[float]] = [[0.0] for _ in range(streams)]
    for _ in range(steps):
        clock.now += step_s
        for index, interval in enumerate(intervals):
            unsent[index] += 1
            if unsent[index] >= interval:
                unsent[index] = 0
                pieces[index].append(clock.now)
    return pieces


@pytest.mark.parametrize(
    ("streams", "step_s", "tokens"),
    [(1, 0.002, 1), (8, 0.01, 1), (64, 0.07, 1), (64, 0.01, 7), (128, 0.025, 6), (100_000, 0.06, 5)],
)
def test_the_tokens_of_a_piece_follow_from_the_streams_and_the_steps(
    streams: int, step_s: float, tokens: int
) -> None:
    clock = Clock()
    rate = PieceRate(1_000.0, clock)
    rate.streams = streams
    interval = StreamInterval(rate)
    sent = []
    unsent = 0
    for _ in range(100):
        clock.now += step_s
        unsent += 1
        if unsent >= interval:
            sent.append(unsent)
            unsent = 0
    assert set(sent) == {tokens}


def test_a_slow_step_ends_the_wait_of_what_is_unsent() -> None:
    clock = Clock()
    rate = PieceRate(1_000.0, clock)
    rate.streams = 128
    interval = StreamInterval(rate)
    clock.now = 0.01
    assert not interval <= 1
    # A step that computes many prompts.
    clock.now = 0.2
    assert interval <= 2


@given(streams=st.integers(1, 300), step_s=st.floats(0.005, 0.3))
def test_a_replica_sends_no_more_pieces_than_its_rate_and_no_token_waits_longer_than_the_limit(
    streams: int, step_s: float
) -> None:
    steps = round(1 / step_s)
    pieces = pieces_of(streams, step_s, steps)
    # The bound of a wait comes first: beyond 250 streams there are more pieces.
    allowed = max(1_000.0, streams / LONGEST_S) * steps * step_s + streams
    assert sum(len(each) - 1 for each in pieces) <= allowed
    for each in pieces:
        gaps = [later - earlier for earlier, later in itertools.pairwise(each)]
        assert all(gap <= min(streams / 1_000.0, LONGEST_S) + step_s + 1e-9 for gap in gaps)
