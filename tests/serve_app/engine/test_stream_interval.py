import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.stream_interval import StreamInterval


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(pace: StreamInterval, clock: Clock, tokens_per_s: float, seconds: float) -> None:
    """Let an engine make tokens for a while, a hundred times a second."""
    for _ in range(round(seconds * 100)):
        clock.now += 0.01
        pace.count(round(tokens_per_s / 100))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_every_token_travels_alone_until_something_is_known(clock: Clock) -> None:
    pace = StreamInterval(pieces_per_s=1, clock=clock)
    pace.streams = 1_000
    assert pace.tokens_per_piece() == 1


def test_tokens_of_a_slow_engine_travel_alone_however_many_streams_there_are(clock: Clock) -> None:
    pace = StreamInterval(pieces_per_s=1_000, clock=clock)
    run(pace, clock, 400, seconds=5)
    pace.streams = 128
    assert pace.tokens_per_piece() == 1


@pytest.mark.parametrize(("tokens_per_s", "together"), [(2_000, 2), (6_000, 6), (10_000, 10), (90_000, 32)])
def test_the_faster_the_engine_the_more_tokens_travel_together(
    clock: Clock, tokens_per_s: int, together: int
) -> None:
    pace = StreamInterval(pieces_per_s=1_000, clock=clock)
    pace.streams = 64
    run(pace, clock, tokens_per_s, seconds=10)
    assert pace.tokens_per_piece() == together


def test_it_follows_the_engine_within_seconds(clock: Clock) -> None:
    pace = StreamInterval(pieces_per_s=100, most=100, clock=clock)
    pace.streams = 64
    run(pace, clock, 1_000, seconds=10)
    assert pace.tokens_per_piece() == 10
    run(pace, clock, 100, seconds=5)
    assert pace.tokens_per_piece() == 1


def test_counts_from_before_a_pause_are_forgotten(clock: Clock) -> None:
    pace = StreamInterval(pieces_per_s=100, most=100, clock=clock)
    pace.streams = 64
    run(pace, clock, 1_000, seconds=10)
    clock.now += 60
    pace.count(1)
    assert pace.tokens_per_piece() == 1


@given(
    pieces_per_s=st.floats(1, 1e5),
    most=st.integers(1, 64),
    streams=st.integers(0, 10_000),
    counted=st.lists(st.tuples(st.integers(0, 4_000), st.floats(0, 1e3)), max_size=20),
)
def test_no_more_tokens_travel_together_than_allowed_and_than_there_are_streams(
    pieces_per_s: float, most: int, streams: int, counted: list[tuple[int, float]]
) -> None:
    clock = Clock()
    pace = StreamInterval(pieces_per_s=pieces_per_s, most=most, clock=clock)
    for tokens, seconds in counted:
        clock.now += seconds
        pace.count(tokens)
    pace.streams = streams
    assert 1 <= pace.tokens_per_piece() <= max(1, min(most, streams))
