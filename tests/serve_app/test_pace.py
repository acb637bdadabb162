from hypothesis import given
from hypothesis import strategies as st

from serve_app.pace import Pace

ENDED = st.lists(st.tuples(st.integers(1, 4_000), st.floats(1e-3, 1e3)), min_size=1, max_size=20)


def test_every_token_travels_alone_until_something_is_known() -> None:
    pace = Pace(pieces_per_s=1)
    pace.streams = 1_000
    assert pace.tokens_per_piece() == 1


def test_tokens_of_few_streams_travel_alone() -> None:
    pace = Pace(pieces_per_s=1_000)
    pace.learn(100, 1.0)
    for streams in range(15):
        pace.streams = streams
        assert pace.tokens_per_piece() == 1


def test_the_more_streams_the_more_tokens_travel_together() -> None:
    pace = Pace(pieces_per_s=1_000)
    pace.learn(100, 1.0)
    for streams, tokens in [(20, 2), (64, 6), (100, 10)]:
        pace.streams = streams
        assert pace.tokens_per_piece() == tokens


def test_it_follows_an_engine_that_becomes_slower() -> None:
    pace = Pace(pieces_per_s=100, most=100)
    pace.streams = 10
    pace.learn(100, 1.0)
    assert pace.tokens_per_piece() == 10
    for _ in range(200):
        pace.learn(10, 1.0)
    assert pace.tokens_per_piece() == 1


@given(pieces_per_s=st.floats(1, 1e5), most=st.integers(1, 64), streams=st.integers(0, 10_000), ended=ENDED)
def test_all_streams_together_stay_near_the_rate(
    pieces_per_s: float, most: int, streams: int, ended: list[tuple[int, float]]
) -> None:
    pace = Pace(pieces_per_s=pieces_per_s, most=most)
    for tokens, seconds in ended:
        pace.learn(tokens, seconds)
    pace.streams = streams
    together = pace.tokens_per_piece()
    assert 1 <= together <= most
    fastest = max(tokens / seconds for tokens, seconds in ended)
    if together < most:
        # Rounding may take half a token off each piece.
        slowest = min(tokens / seconds for tokens, seconds in ended)
        assert streams * slowest / (together + 0.5) <= pieces_per_s * (1 + 1e-9)
    if together > 1:
        assert streams * fastest / (together - 0.5) >= pieces_per_s * (1 - 1e-9)
