from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.stream_interval import LONGEST_S, STREAMS, StreamIntervals


def test_a_lone_stream_and_those_of_an_unknown_engine_have_a_piece_for_each_token() -> None:
    intervals = StreamIntervals()
    assert [intervals.begin() for _ in range(500)] == [1] * 500
    alone = StreamIntervals()
    alone.begin()
    alone.end(100, 0.1)
    assert alone.begin() == 1


@given(streams=st.integers(1, 1_000), token_s=st.floats(0.001, 1.0))
def test_pieces_grow_with_the_streams_as_far_as_no_token_waits_longer_than_the_limit(
    streams: int, token_s: float
) -> None:
    intervals = StreamIntervals()
    intervals.begin()
    intervals.end(10, 10 * token_s)
    tokens = [intervals.begin() for _ in range(streams)]
    assert tokens == sorted(tokens)
    assert tokens[-1] == 1 or tokens[-1] * token_s <= LONGEST_S * 1.001
    assert tokens[-1] <= max(1, streams // STREAMS)
    assert intervals.streams == streams


def test_the_time_of_a_token_follows_the_streams_that_end() -> None:
    intervals = StreamIntervals()
    for _ in range(200):
        intervals.begin()
    intervals.end(10, 10.0)
    assert intervals.begin() == 1
    for _ in range(100):
        intervals.end(10, 0.1)
    # A stream with 10 ms for a token: 0.1 s are nine of them and a bit.
    assert [intervals.begin() for _ in range(100)][-1] == 9
    # A stream that ends with its first piece says nothing.
    intervals.end(0, 0.0)
