"""Lengths and arrivals of requests."""

import random
import statistics
from itertools import islice

import pytest

from serve_app.tuning.workload import LengthError, TokenLengths, Workload


def test_one_number_is_the_length_of_all() -> None:
    lengths = TokenLengths.parse("300")
    assert {lengths.draw(random.Random(seed)) for seed in range(20)} == {300}
    assert (lengths.most, lengths.expected, str(lengths)) == (300, 300.0, "300")


@pytest.mark.parametrize("text", ["1500:800", "300:300", "20:5"])
def test_lognormal_lengths_have_their_mean_and_spread(text: str) -> None:
    lengths = TokenLengths.parse(text)
    numbers = random.Random(1)
    drawn = [lengths.draw(numbers) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(lengths.mean, rel=0.03)
    assert statistics.fmean(drawn) == pytest.approx(lengths.expected, rel=0.02)
    assert statistics.stdev(drawn) == pytest.approx(lengths.spread, rel=0.1)
    assert min(drawn) >= 1
    assert max(drawn) == lengths.most
    assert drawn.count(lengths.most) / len(drawn) < 0.003


def test_a_cut_shortens_the_longest() -> None:
    lengths = TokenLengths.parse("300:300").cut(400)
    numbers = random.Random(1)
    drawn = [lengths.draw(numbers) for _ in range(20_000)]
    assert max(drawn) == 400
    assert statistics.fmean(drawn) == pytest.approx(lengths.expected, rel=0.01)


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "10:", ":5", "300±100", "lognormal"])
def test_a_wrong_length_says_what_is_allowed(text: str) -> None:
    with pytest.raises(LengthError, match="write tokens, as in 300, or MEAN:SPREAD"):
        TokenLengths.parse(text)


def test_max_tokens_is_by_default_that_of_the_longest_answer() -> None:
    input, output = TokenLengths.parse("100"), TokenLengths.parse("300:150")
    assert Workload.of(1.0, input, output).max_tokens == output.most
    cut = Workload.of(1.0, input, output, max_tokens=200)
    assert (cut.max_tokens, cut.output.most) == (200, 200)
    assert Workload.of(1.0, input, TokenLengths.parse("300"), max_tokens=500).output.most == 300


def test_the_same_seed_draws_the_same_requests() -> None:
    workload = Workload.of(1.0, TokenLengths.parse("100:50"), TokenLengths.parse("300:150"))
    first, again, other = (list(islice(workload.draws(seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert statistics.fmean(draw.gap for draw in islice(workload.draws(3), 20_000)) == pytest.approx(
        1, abs=0.03
    )


def test_whole_blocks_of_a_prompt_are_cached() -> None:
    workload = Workload.of(1.0, TokenLengths.parse("100"), TokenLengths.parse("10"), prefix_share=0.5)
    assert workload.computed(100) == 100 - 48
    everything = Workload.of(1.0, TokenLengths.parse("96"), TokenLengths.parse("10"), prefix_share=1.0)
    assert everything.computed(96) == 1
