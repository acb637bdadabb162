"""Messages of vLLM's schedulers to the replica."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import SchedulerConfig
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from serve_app.engine.vllm import held_tokens
from serve_app.engine.vllm.held_tokens import HeldTokens
from serve_app.engine.vllm.options import vllm_args
from serve_app.settings.models import LLMSettings
from serve_app.settings.sources import DEMO_MODEL

STEP_S = 0.001
SCHEDULER = "serve_app.engine.vllm.scheduler.build_scheduler"


class Steps:
    """Stands for vLLM's scheduler: each request ends with the token 0."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.scheduler_config = SimpleNamespace(stream_interval=1)
        self.observability_config = SimpleNamespace(enable_logging_iteration_details=False)
        self.log_stats = True

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        return new_token_ids, new_token_ids[-1] == 0

    def make_stats(self, spec_decoding_stats: Any = None, **options: Any) -> SchedulerStats | None:
        return SchedulerStats(num_running_reqs=len(self.running)) if self.log_stats else None


class Held(HeldTokens, Steps):
    """The scheduler under test, whose private method vLLM calls for each request of a step."""

    def tell(self, request: Request, *token_ids: int) -> list[int]:
        return self._update_request_with_output(request, list(token_ids), is_stale=False)[0]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(held_tokens, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def scheduler(now: list[float]) -> Held:
    return Held()


def request(*, resumable: bool = False, **params: Any) -> Request:
    params = {"output_kind": RequestOutputKind.FINAL_ONLY, "max_tokens": 100} | params
    return Request("a", [1, 2], SamplingParams(**params), None, resumable=resumable)


def test_the_first_token_of_a_whole_answer_is_told_at_once_and_the_others_with_the_end(
    scheduler: Held,
) -> None:
    whole = request()
    told = [scheduler.tell(whole, token) for token in (5, 6, 7, 0)]
    assert told == [[5], [], [], [6, 7, 0]]


def test_tokens_are_held_for_a_quarter_of_a_second(scheduler: Held, now: list[float]) -> None:
    whole = request()
    told = []
    for token in range(1, 1001):
        told.append(scheduler.tell(whole, token))
        now[0] += STEP_S
    told.append(scheduler.tell(whole, 0))
    assert [token for tokens in told for token in tokens] == [*range(1, 1001), 0]
    assert max(map(len, told)) <= 0.25 / STEP_S + 1
    assert len([tokens for tokens in told if tokens]) == 1 + 1 / 0.25


def test_each_request_has_its_own_tokens(scheduler: Held) -> None:
    first, second = request(), request()
    for token in (1, 2, 3):
        scheduler.tell(first, token)
        scheduler.tell(second, token + 10)
    assert (scheduler.tell(second, 0), scheduler.tell(first, 0)) == ([12, 13, 0], [2, 3, 0])


@pytest.mark.parametrize(
    "others",
    [
        {"output_kind": RequestOutputKind.CUMULATIVE},
        {"output_kind": RequestOutputKind.DELTA, "stream_interval": 1},
        {"stop": ["x"]},
        {"logprobs": 0},
        {"structured_outputs": StructuredOutputsParams(regex="a*")},
        {"resumable": True},
    ],
    ids=lambda others: list(others)[-1],
)
def test_a_request_that_is_looked_at_after_each_token_is_told_each(
    scheduler: Held, others: dict[str, Any]
) -> None:
    watched = request(**others)
    assert [scheduler.tell(watched, token) for token in (5, 6, 0)] == [[5], [6], [0]]


def streams(scheduler: Held, number: int) -> list[Request]:
    """Return running streams, after the step in which they began."""
    scheduler.running = [request(output_kind=RequestOutputKind.DELTA) for _ in range(number)]
    for each in scheduler.running:
        assert scheduler.tell(each, 1) == [1]
    scheduler.make_stats()
    return scheduler.running


@pytest.mark.parametrize(("number", "interval"), [(1, 0.001), (32, 0.032), (90, 0.09), (1000, 0.1)])
def test_the_tokens_of_a_stream_come_at_the_pace_of_its_pieces(
    scheduler: Held, now: list[float], number: int, interval: float
) -> None:
    stream = streams(scheduler, number)[0]
    told, at = [1], []
    for token in range(2, 1002):
        now[0] += STEP_S
        if tokens := scheduler.tell(stream, token):
            told += tokens
            at.append(now[0])
    assert told + scheduler.tell(stream, 0) == [*range(1, 1002), 0]
    gaps = [after - before for before, after in pairwise([100.0, *at])]
    assert max(gaps) <= interval + STEP_S
    assert min(gaps) >= interval - STEP_S / 2


def test_the_tokens_of_a_lone_stream_wait_for_no_others(scheduler: Held, now: list[float]) -> None:
    (stream,) = streams(scheduler, 1)
    for token in range(2, 10):
        now[0] += 2 * STEP_S
        assert scheduler.tell(stream, token) == [token]


def test_an_interval_of_the_engine_is_kept(scheduler: Held) -> None:
    scheduler.scheduler_config.stream_interval = 8
    stream = streams(scheduler, 100)[0]
    assert [scheduler.tell(stream, token) for token in (5, 6, 0)] == [[5], [6], [0]]
    whole = request()
    assert [scheduler.tell(whole, token) for token in (5, 6, 0)] == [[5], [], [6, 0]]


def test_statistics_come_at_most_every_few_milliseconds_and_tell_the_number_of_steps(
    scheduler: Held, now: list[float]
) -> None:
    scheduler.running = [request()]
    steps = []
    for _ in range(1000):
        if stats := scheduler.make_stats():
            steps.append(stats.step_counter)
        now[0] += STEP_S
    assert len(steps) == pytest.approx(1000 * STEP_S / 0.01, abs=2)
    assert steps[0] == 1
    assert 1000 - 0.01 / STEP_S <= sum(steps) <= 1000


def test_a_long_step_has_its_own_statistics(scheduler: Held, now: list[float]) -> None:
    scheduler.running = [request()]
    for _ in range(5):
        stats = scheduler.make_stats()
        assert stats is not None
        assert stats.step_counter == 1
        now[0] += 0.01


def test_the_end_of_the_last_request_is_told_at_once(scheduler: Held) -> None:
    scheduler.running = [request()]
    assert scheduler.make_stats() is not None
    assert scheduler.make_stats() is None
    scheduler.running = []
    stats = scheduler.make_stats()
    assert stats is not None
    assert (stats.num_running_reqs, stats.step_counter) == (0, 2)


def test_statistics_of_one_step_are_told_with_it(scheduler: Held) -> None:
    scheduler.running = [request()]
    scheduler.make_stats()
    assert scheduler.make_stats(object()) is not None
    assert scheduler.make_stats(kv_connector_stats=object()) is not None
    assert scheduler.make_stats(None, kv_connector_stats=None) is None


def test_an_engine_without_statistics_has_none(scheduler: Held) -> None:
    scheduler.log_stats = False
    assert scheduler.make_stats() is None


@pytest.mark.parametrize(
    "option",
    [{"return_sampling_mask": True}, {"aux_output_connector": object()}],
    ids=["sampling masks", "routed experts"],
)
def test_the_tokens_of_an_engine_that_tells_more_of_each_are_not_held(
    scheduler: Held, option: dict[str, Any]
) -> None:
    vars(scheduler).update(option)
    whole = request()
    assert [scheduler.tell(whole, token) for token in (5, 6, 0)] == [[5], [6], [0]]


def test_an_engine_that_logs_its_steps_has_statistics_of_each(scheduler: Held) -> None:
    scheduler.observability_config.enable_logging_iteration_details = True
    scheduler.running = [request()]
    steps = [stats.step_counter for _ in range(3) if (stats := scheduler.make_stats())]
    assert steps == [1, 1, 1]


@pytest.mark.parametrize(("in_advance", "kind"), [(False, Scheduler), (True, AsyncScheduler)])
def test_an_engine_has_the_scheduler_of_its_options_with_held_tokens(
    monkeypatch: pytest.MonkeyPatch, in_advance: bool, kind: type
) -> None:
    made: list[Any] = []
    # The constructor asks for a whole engine.
    monkeypatch.setattr(Scheduler, "__init__", lambda self, **options: made.append(options))
    monkeypatch.setattr(AsyncScheduler, "__init__", lambda self, **options: made.append(options))
    config = SchedulerConfig.default_factory(async_scheduling=in_advance, scheduler_cls=SCHEDULER)
    engine = SimpleNamespace(scheduler_config=config, diffusion_config=None)
    held = config.get_scheduler_cls()(vllm_config=engine, log_stats=True)
    assert isinstance(held, kind)
    assert made == [{"vllm_config": engine, "log_stats": True}]
    for name in ("_update_request_with_output", "make_stats"):
        assert getattr(type(held), name) is getattr(HeldTokens, name)
        assert callable(getattr(kind, name))


def test_the_class_of_the_options_is_this_one() -> None:
    args = vllm_args(LLMSettings(id="demo", source=DEMO_MODEL))
    assert args.scheduler_cls == SCHEDULER
    own = LLMSettings.model_validate({"id": "demo", "source": DEMO_MODEL, "engine": {"scheduler_cls": "a.B"}})
    assert vllm_args(own).scheduler_cls == "a.B"
