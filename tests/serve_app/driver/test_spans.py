"""A set of row numbers."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.driver.spans import Spans


@given(st.lists(st.integers(0, 30)))
def test_spans_are_a_set(numbers: list[int]) -> None:
    spans = Spans()
    known: set[int] = set()
    for number in numbers:
        assert spans.add(number) == (number not in known)
        known.add(number)
        assert len(spans) == len(known)
    assert [number for number in range(32) if number in spans] == sorted(known)


def test_neighbours_are_one_span() -> None:
    spans = Spans()
    for number in [*range(0, 1000, 2), *range(1, 1000, 2)]:
        spans.add(number)
    assert spans.count == 1


def test_a_copy_is_independent() -> None:
    spans = Spans()
    spans.add(1)
    copy = spans.copy()
    spans.add(2)
    assert 2 not in copy
    assert 1 in copy
