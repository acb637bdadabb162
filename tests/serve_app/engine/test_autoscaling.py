"""How many replicas the tokens call for, with the bounds and delays that Serve puts around the policy."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from ray import cloudpickle
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from batcher import ContinuousStats
from serve_app.engine.autoscaling import ByTokens
from serve_app.engine.deployment import Engine

ENGINE = DeploymentID("Engine:demo", "llm")


def reported(stats: ContinuousStats) -> dict[str, float]:
    """Return what an Engine with these statistics reports."""
    part: Any = SimpleNamespace(_engine=SimpleNamespace(batcher=SimpleNamespace(stats=stats)))
    return asyncio.run(Engine.record_autoscaling_stats(part))


def context(
    replicas: list[ContinuousStats],
    *,
    requests: float = 1.0,
    target: int | None = None,
    state: dict[str, Any] | None = None,
    **config: Any,
) -> AutoscalingContext:
    """Return what Serve shows a policy of replicas with these statistics."""
    metrics: dict[str, dict[ReplicaID, float]] = {}
    ids = [ReplicaID(str(number), ENGINE) for number in range(len(replicas))]
    for replica, stats in zip(ids, replicas, strict=True):
        for name, value in reported(stats).items():
            metrics.setdefault(name, {})[replica] = value
    settings = AutoscalingConfig(**({"min_replicas": 0, "max_replicas": 4} | config))
    return AutoscalingContext(
        deployment_id=ENGINE,
        deployment_name=ENGINE.name,
        app_name=ENGINE.app_name,
        current_num_replicas=len(replicas),
        target_num_replicas=len(replicas) if target is None else target,
        running_replicas=ids,
        total_num_requests=requests,
        total_queued_requests=0.0,
        aggregated_metrics=metrics,
        raw_metrics={},
        capacity_adjusted_min_replicas=settings.min_replicas,
        capacity_adjusted_max_replicas=settings.max_replicas,
        policy_state=state or {},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=settings,
    )


def holding(tokens: int = 0, sequences: int = 0, **more: Any) -> ContinuousStats:
    return ContinuousStats(capacity=1000, max_running=10, running_cost=tokens, running=sequences, **more)


def wanted(replicas: list[ContinuousStats], target: float = 0.8, **options: Any) -> float:
    return ByTokens(target)(context(replicas, **options))[0]


def test_one_call_of_many_prompts_calls_for_more_replicas() -> None:
    full = holding(1000, 5, queue_cost=2000, queue_depth=10, outside=5, outside_cost=1000)
    assert wanted([full]) == 5
    assert wanted([full, holding()]) == 5
    assert wanted([holding(800)]) == 1
    assert wanted([holding(801)]) == 2
    assert wanted([holding(500), holding(500)], target=0.5) == 2


def test_sequences_count_where_they_are_the_tighter_bound() -> None:
    assert wanted([holding(100, 10, queue_depth=10, queue_cost=200, outside=10)]) == math.ceil(3 / 0.8)
    free = ContinuousStats(capacity=1000, max_running=None, running=10, running_cost=100)
    assert wanted([free]) == 1


def test_none_is_needed_when_nothing_runs_and_one_while_a_request_is_there() -> None:
    assert wanted([holding()], requests=0.0) == 0
    assert wanted([holding()], requests=1.0) == 1
    assert wanted([holding(1, 1)], requests=0.0) == 1


def test_without_a_report_nothing_changes() -> None:
    assert wanted([], target=0.8) == 0
    fresh = context([], requests=0.0, target=3)
    assert ByTokens()(fresh)[0] == 3


@pytest.mark.parametrize("target", [0, -1, 1.5, "1", True, None])
def test_the_target_is_checked(target: Any) -> None:
    with pytest.raises(ValueError, match=r"policy_kwargs.target must be a number above 0 and up to 1"):
        ByTokens(target)


def test_serve_takes_it_from_a_config_and_ships_it_to_its_controller() -> None:
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function="serve_app.engine.autoscaling:ByTokens", policy_kwargs={"target": 0.5}
    )
    kind = cloudpickle.loads(policy.get_serialized_policy_def() or b"")
    assert kind(**policy.policy_kwargs)(context([holding(1000)]))[0] == 2


def test_serve_waits_before_it_scales_down_and_never_goes_below_one_at_a_stretch() -> None:
    decide = _apply_autoscaling_config(ByTokens())
    config: dict[str, Any] = {"upscale_delay_s": 0, "downscale_delay_s": 300}
    up, _ = decide(context([holding(5000, 5)], **config))
    assert up == 7
    still, state = decide(context([holding(), holding()], requests=0.0, **config))
    assert still == 2
    config["downscale_delay_s"] = 0
    down, _ = decide(context([holding(), holding()], requests=0.0, state=state, **config))
    assert down == 1
    asleep, _ = decide(context([holding()], requests=0.0, **config))
    assert asleep == 0
    awake, _ = decide(context([], requests=1.0, **config))
    assert awake == 1


@given(
    loads=st.lists(st.integers(0, 10_000), min_size=1, max_size=6),
    more=st.integers(0, 5_000),
    target=st.floats(0.1, 1.0),
)
def test_more_tokens_never_call_for_fewer_replicas(loads: list[int], more: int, target: float) -> None:
    before = wanted([holding(load) for load in loads], target)
    after = wanted([holding(load, queue_cost=more) for load in loads], target)
    assert 0 <= before <= after
    assert before >= sum(loads) / 1000 / target
