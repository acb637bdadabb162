"""How batches are cut: what goes together, what it pads, and that nothing starves."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher import Entry, Former, RequestQueue
from batcher.forming import Forming
from tests.fakes.clock import Clock


def former(forming: Forming, max_records: int = 4, budget: int = 10**9, **fields: int) -> Former:
    values = {"padded": True, "lookahead": 16 * max_records, **fields}
    return Former(forming, max_records, budget, **values)  # type: ignore[arg-type]


def queue_of(lengths: Sequence[int]) -> RequestQueue[Entry[Any]]:
    queue: RequestQueue[Entry[Any]] = RequestQueue(clock=Clock())
    for place, length in enumerate(lengths):
        queue.add(Entry(place, length))
    return queue


def batches(cut: Former, lengths: Sequence[int]) -> list[list[int]]:
    """Return the lengths of the batches into which a queue is cut until it is empty."""
    queue = queue_of(lengths)
    cuts = []
    while queue.size:
        cuts.append([entry.cost for entry in cut.cut(queue)])
    assert cut.cut(queue) == []
    return cuts


def padded(cuts: list[list[int]]) -> int:
    return sum(max(batch) * len(batch) for batch in cuts)


def test_arrival_order_fills_the_budget() -> None:
    assert batches(former("arrival", budget=100, padded=False), [50, 40, 20, 90, 5, 200, 1]) == [
        [50, 40],
        [20],
        [90, 5],
        [200],
        [1],
    ]


def test_static_batches_count_records_only() -> None:
    assert batches(former("static", max_records=3, budget=1), [9, 9, 9, 9]) == [[9, 9, 9], [9]]


def test_sorted_takes_the_nearest_in_length() -> None:
    assert batches(former("sorted"), [50, 900, 52, 910, 49, 905, 51, 900]) == [
        [49, 50, 51, 52],
        [900, 900, 905, 910],
    ]


def test_sorted_prefers_a_full_batch_and_then_the_least_padding() -> None:
    assert batches(former("sorted", max_records=3), [10, 9, 8, 30, 11, 12])[0] == [8, 9, 10]


def test_bucketed_takes_what_is_in_the_same_bucket() -> None:
    cuts = batches(former("bucketed"), [100, 10, 101, 11, 99, 500])
    assert cuts == [[100, 101, 99], [10, 11], [500]]


@pytest.mark.parametrize("forming", ["sorted", "bucketed"])
def test_batches_by_length_keep_to_the_budget(forming: Forming) -> None:
    for is_padded in (True, False):
        for batch in batches(
            former(forming, max_records=8, budget=50, padded=is_padded), [10] * 8 + [12] * 8
        ):
            cost = max(batch) * len(batch) if is_padded else sum(batch)
            assert 30 <= cost <= 50


@pytest.mark.parametrize("forming", ["arrival", "sorted", "bucketed"])
def test_a_record_over_the_budget_goes_alone(forming: Forming) -> None:
    for is_padded in (True, False):
        cuts = batches(former(forming, budget=100, padded=is_padded), [500, 500, 20, 20, 0])
        assert sorted(map(sorted, cuts))[-2:] == [[500], [500]]


@pytest.mark.parametrize("forming", ["sorted", "bucketed"])
def test_the_look_ahead_is_bounded(forming: Forming) -> None:
    lengths = [10, 500, 10, 10, 10, 10]
    assert batches(former(forming, lookahead=3), lengths)[0] == [10, 10]
    assert batches(former(forming, lookahead=9), lengths)[0] == [10] * 4


@given(
    st.sampled_from(["arrival", "static", "sorted", "bucketed"]),
    st.lists(st.integers(0, 300), max_size=60),
    st.integers(1, 9),
    st.integers(1, 600),
    st.booleans(),
    st.integers(1, 40),
)
def test_every_cut_has_the_first_record_and_keeps_the_bounds(
    forming: Forming, lengths: list[int], max_records: int, budget: int, is_padded: bool, lookahead: int
) -> None:
    cut = Former(forming, max_records, budget, is_padded, lookahead)
    queue = queue_of(lengths)
    seen = []
    while queue.size:
        head = queue.head()
        batch = cut.cut(queue)
        assert head in batch
        assert len(batch) <= max_records
        costs = [entry.cost for entry in batch]
        cost = max(costs) * len(batch) if is_padded else sum(costs)
        assert cost <= budget or len(batch) == 1 or forming == "static"
        seen += [entry.record for entry in batch]
    assert sorted(seen) == list(range(len(lengths)))


@pytest.mark.parametrize(("forming", "most"), [("sorted", 1.05), ("bucketed", 1.15)])
def test_batches_by_length_pad_little_more_than_sorting_everything(forming: Forming, most: float) -> None:
    rng = random.Random(3)
    lengths = [max(1, min(2048, int(rng.lognormvariate(4.5, 0.9)))) for _ in range(8000)]
    ranked = sorted(lengths)
    best = padded([ranked[i : i + 64] for i in range(0, len(ranked), 64)])
    queue = queue_of(lengths[:2000])
    waiting = iter(lengths[2000:])
    cut = former(forming, max_records=64)
    cuts = []
    while queue.size:
        batch = cut.cut(queue)
        cuts.append([entry.cost for entry in batch])
        for _, length in zip(batch, waiting, strict=False):
            queue.add(Entry(None, length))
    assert sum(map(len, cuts)) == 8000
    assert padded(cuts) / sum(map(sum, cuts)) < most * best / sum(lengths)
    arrival = padded(batches(former("arrival", max_records=64), lengths))
    assert arrival > 3 * best
