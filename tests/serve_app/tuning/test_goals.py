"""Goals in the words of a user."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.tuning.goals import METRICS, Goal, parse_goals


@given(
    st.sampled_from(sorted(METRICS)),
    st.integers(1, 99),
    st.floats(1e-4, 1e4).map(lambda bound: float(f"{bound:g}")),
)
def test_a_goal_is_what_its_text_says(metric: str, percentile: int, bound: float) -> None:
    goal = Goal(metric, percentile, bound)  # type: ignore[arg-type]
    assert Goal.parse(str(goal)) == goal
    assert Goal.parse(f"  {metric}_p{percentile} < {bound:g} ") == goal


def test_several_goals_have_commas_between_them() -> None:
    found = parse_goals("ttft_p99<0.5, tpot_p50<0.05,latency_p95<10,")
    assert [goal.name for goal in found] == ["ttft_p99", "tpot_p50", "latency_p95"]
    assert found[0] == Goal("ttft", 99, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no goal"),
        ("ttft_p99", "METRIC_PERCENTILE<SECONDS, as in ttft_p99<0.5"),
        ("ttft_p99>0.5", "is no goal"),
        ("itl_p99<0.5", "'itl' is no metric; take one of ttft .*, tpot .*, latency"),
        ("ttft<0.5", "'ttft' is no metric"),
        ("ttft_99<0.5", "'99' is no percentile; write p1 to p99"),
        ("ttft_p100<0.5", "'p100' is no percentile"),
        ("ttft_p0<0.5", "'p0' is no percentile"),
        ("ttft_p99<fast", "'fast' is no bound; write seconds above 0"),
        ("ttft_p99<0", "'0' is no bound"),
        ("ttft_p99<inf", "'inf' is no bound"),
        ("ttft_p99<nan", "'nan' is no bound"),
        ("ttft_p99<1,ttft_p99<2", "ttft_p99 has two bounds"),
    ],
)
def test_a_wrong_goal_names_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_goals(text)
