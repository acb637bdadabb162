"""Requests of a load."""

from itertools import islice

import pytest

from serve_app.tuning.load import Requests
from serve_app.tuning.service import LoadRequest
from serve_app.tuning.workload import TokenLengths
from serve_app.wire.usage import Tokens


def some(requests: Requests, seed: int, count: int = 50) -> list[LoadRequest]:
    requests.begin(seed)
    return list(islice(iter(requests.next, None), count))


def test_a_seed_has_one_load() -> None:
    requests = Requests("m", TokenLengths.parse("100:50"), TokenLengths.parse("20:10"))
    first = some(requests, 1)
    assert first == some(requests, 1)
    assert first != some(requests, 2)
    lengths = {len(ask.body["prompt"]) for ask in first}
    assert len(lengths) > 10
    assert all(ask.body["max_tokens"] == ask.tokens and ask.body["ignore_eos"] for ask in first)


def test_a_dataset_is_gone_through_before_a_prompt_comes_again() -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    requests = Requests("m", TokenLengths(5), TokenLengths(4), prompts, tier="flex")
    found = [ask.body["prompt"] for ask in some(requests, 1, 40)]
    assert sorted(found[:20]) == sorted(found[20:]) == sorted(prompts)
    assert found[:20] != prompts
    assert requests.next().body["service_tier"] == "flex"


def test_gaps_are_those_of_independent_requests() -> None:
    requests = Requests("m", TokenLengths(5), TokenLengths(4))
    requests.begin(1)
    gaps = [requests.gap() for _ in range(20_000)]
    assert 0.98 < sum(gaps) / len(gaps) < 1.02
    # A share of 1/e is longer than the mean.
    assert 0.355 < sum(gap > 1 for gap in gaps) / len(gaps) < 0.381


def test_the_requests_of_an_open_loop_are_known_before() -> None:
    requests = Requests("m", TokenLengths.parse("100:50"), TokenLengths.parse("20:10"))
    requests.begin(1)
    before = requests.next()
    known = list(islice(requests.arrivals(4.0, 1), 3))
    requests.begin(1)
    at = 0.0
    for arrival in known:
        at += requests.gap() / 4.0
        ask = requests.next()
        assert arrival == (at, len(ask.body["prompt"]), ask.tokens)
    # They are drawn apart from those that are sent.
    requests.begin(1)
    next(requests.arrivals(4.0, 2))
    assert requests.next() == before


def test_the_requests_of_a_dataset_have_no_known_lengths() -> None:
    requests = Requests("m", TokenLengths(5), TokenLengths(4), ["a prompt"])
    with pytest.raises(ValueError, match="the lengths of a dataset's prompts aren't known"):
        next(requests.arrivals(1.0, 1))


def test_requests_have_the_lengths_of_calls_together() -> None:
    calls = [Tokens(100, 0, 7), Tokens(40, 32, 90), Tokens(20, 20, 1)]
    requests = Requests("m", TokenLengths(50), TokenLengths(30), calls=calls)
    found = some(requests, 1)
    assert {(len(ask.body["prompt"]), ask.tokens) for ask in found} == {(100, 7), (40, 90), (20, 1)}
    assert all(ask.body["max_tokens"] == ask.tokens and ask.body["ignore_eos"] for ask in found)
    assert found == some(requests, 1)


def test_as_much_of_a_prompt_is_shared_as_was_in_the_cache() -> None:
    calls = [Tokens(40, 32, 1), Tokens(20, 20, 1)]
    requests = Requests("m", TokenLengths(30), TokenLengths(1), calls=calls)
    first, second = (
        {len(prompt): prompt for prompt in (ask.body["prompt"] for ask in some(requests, seed))}
        for seed in (1, 2)
    )
    assert first[40][:32] == second[40][:32]
    assert first[40][32:] != second[40][32:]
    # All of it was in the cache; the last token is computed anyway.
    assert first[20][:19] == second[20][:19] == first[40][:19]
