"""Live requests beside rows, with vLLM's own scheduler underneath and on virtual time."""

import math
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from serve_app.engine.vllm.engine import VLLMEngine
from serve_app.engine.vllm.scheduler import LiveFirst
from serve_app.engine.vllm.stats import EngineStats
from serve_app.simulation.profiles import PROFILES, Work
from serve_app.simulation.vllm_executor import SimulatedExecutor
from serve_app.tuning.profiling import ANSWER, WAVES
from tests.serve_app.engine.vllm.features import (
    DRAFTS,
    GOALS,
    STAGES,
    STORE,
    Drafts,
    FewImages,
    Loading,
    Stages,
    Windows,
    engine_of,
    image,
)
from tests.serve_app.simulation.virtual_engine import LiveFirstEngine, VirtualEngine, virtual_engines

Start = Callable[..., VirtualEngine]

DEVICE = {
    "base_ms": 50.0,
    "per_prefill_token_ms": 0.25,
    "per_sequence_ms": 0.01,
    "per_kv_token_ms": 0.0002,
    "load_s": 0.0,
    "kv_tokens": 94_000,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
}


PRIORITY = {"scheduling_policy": "priority"}


@pytest.fixture
def start() -> Iterator[Start]:
    with virtual_engines(LiveFirstEngine) as start:
        yield lambda engine=None, **fields: start(engine=PRIORITY | (engine or {}), **DEVICE | fields)


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 60) for _ in range(tokens)]


def go_on(engine: VirtualEngine, seconds: float) -> None:
    """Run for a time on the engine's clock."""
    until = engine.time.now + seconds
    while engine.time.now < until and engine.busy:
        engine.step()


def step_until_ended(engine: VirtualEngine, rows: int) -> None:
    """Run until so many rows have ended, with other requests still there."""
    for _ in range(5000):
        if all(f"row {number}" in engine.ended_at for number in range(rows)):
            return
        engine.step()
    raise AssertionError("the rows don't end")


def learn(engine: VirtualEngine) -> None:
    """Let the engine see some steps, with prompts of several lengths."""
    for number in range(8):
        engine.answer(prompt(1000 + number, 40 + 97 * number), 8, priority=number % 2)
    assert engine.scheduler.times.known


def test_it_hides_no_name_of_vllms_schedulers() -> None:
    own = {name for name in vars(LiveFirst) if not name.startswith("__")}
    changed = {
        *(
            "add_request",
            "has_requests",
            "schedule",
            "get_grammar_bitmask",
            "update_from_output",
            "make_stats",
        ),
        *("_try_schedule_encoder_inputs", "_mamba_block_aligned_split", "_reserve_prefill_lookahead"),
    }
    assert own & {*dir(AsyncScheduler), *dir(Scheduler)} == changed


def test_it_keeps_its_state_under_names_of_its_own(start: Start) -> None:
    with virtual_engines() as plain:
        theirs = vars(plain(**DEVICE).scheduler)
    own = {"times"} | {name for name in vars(start().scheduler) if name.startswith("_")} - {*theirs}
    assert len(own) > 10
    assert not own & {*dir(AsyncScheduler)}


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in turn"])
def test_a_live_prompt_goes_before_those_of_rows(start: Start, ahead: bool) -> None:
    engine = start(async_scheduling=ahead)
    learn(engine)
    for number in range(100):
        engine.add(f"row {number}", prompt(number, 600), 20, priority=1)
    go_on(engine, 1.0)
    sent = engine.time.now
    engine.add("live", prompt(500, 256), 20)
    engine.run()
    # The running step, one that is decided, and its own: a full step of prompts takes 0.56 s.
    assert engine.seen_at["live"][0] - sent < 2 * 0.57
    assert engine.ended_at["live"] < min(engine.ended_at[f"row {number}"] for number in range(50, 100))


def add_with_grammar(engine: VirtualEngine, name: str, tokens: int) -> Future[Any]:
    """Add a live request whose grammar isn't compiled; return what takes the compiled grammar."""
    compiled: Future[Any] = Future()

    def compile(request: Any) -> None:
        request.structured_output_request.grammar = compiled

    engine.core.structured_output_manager.grammar_init = compile
    engine.add(name, prompt(77, tokens), 4, structured_outputs=StructuredOutputsParams(regex="a"))
    return compiled


@pytest.mark.parametrize("blocked", [False, True], ids=["", "beside a request without its grammar"])
def test_prompts_of_rows_make_no_step_longer_than_the_goal(start: Start, blocked: bool) -> None:
    engine = start()
    learn(engine)
    engine.add("live", prompt(1, 100), 60, extra_args={GOALS: (0.0, 0.12)})
    go_on(engine, 0.3)
    if blocked:
        add_with_grammar(engine, "blocked", 2000)
    for number in range(30):
        engine.add(f"row {number}", prompt(10 + number, 900), 10, priority=1)
    step_until_ended(engine, 30)
    gaps = [later - earlier for earlier, later in pairwise(engine.seen_at["live"])]
    assert max(gaps) < 0.13
    # The rows use what the goal leaves.
    assert sorted(gaps)[len(gaps) // 2] > 0.095


def test_a_live_request_without_its_grammar_displaces_no_row(start: Start) -> None:
    ends = []
    for blocked in (False, True):
        engine = start(max_num_seqs=4, kv_tokens=8192)
        for number in range(4):
            engine.add(f"row {number}", prompt(number, 1500), 100, priority=1)
        go_on(engine, 1.0)
        if blocked:
            compiled = add_with_grammar(engine, "live", 3000)
        step_until_ended(engine, 4)
        ends.append(engine.time.now - engine.seen_at["row 0"][0])
    assert ends[1] == pytest.approx(ends[0], rel=0.02)
    # A grammar that fails is a failed request, and no more.
    compiled.set_exception(ValueError("no grammar"))
    engine.run()
    assert engine.tokens["live"] == []


@pytest.mark.parametrize("goal", [0.5, 0.1])
def test_a_long_prompt_that_takes_its_goal_stops_no_row_behind_it(start: Start, goal: float) -> None:
    engine = start()
    learn(engine)
    for number in range(20):
        engine.add(f"row {number}", prompt(number, 20), 100, priority=1)
    go_on(engine, 1.0)
    # 0.8 s for the prompt alone, and 10 s for the answer.
    engine.add("live", prompt(99, 3000), 200, extra_args={GOALS: (goal, 0.0)})
    engine.run()
    first = engine.seen_at["live"][0]
    # The rows that decode are a 50th of the step; the first token waits for no others.
    assert engine.ended_at["row 19"] - first == pytest.approx(100 * 0.053, rel=0.2)


def test_a_goal_for_first_tokens_bounds_the_prompts_of_rows_before_the_next_request_comes(
    start: Start,
) -> None:
    engine = start()
    learn(engine)
    engine.add("live", prompt(1, 20), 2, extra_args={GOALS: (0.36, 0.0)})
    go_on(engine, 0.2)
    for number in range(30):
        engine.add(f"row {number}", prompt(10 + number, 900), 10, priority=1)
    waits = []
    for number in range(10):
        go_on(engine, 0.77)
        sent, name = engine.time.now, f"live {number}"
        engine.add(name, prompt(100 + number, 20), 2, extra_args={GOALS: (0.36, 0.0)})
        while not engine.seen_at[name]:
            engine.step()
        waits.append(engine.seen_at[name][0] - sent)
    assert max(waits) < 0.4, waits


@pytest.mark.parametrize("told", [5, "ab", ["x", "y"], [1e-9], [1e-9] * 3, [math.nan] * 2, [-1.0] * 2])
def test_what_is_no_pair_of_goals_counts_as_none(start: Start, told: Any) -> None:
    engine = start()
    learn(engine)
    engine.add("live", prompt(1, 20), 20, extra_args={GOALS: told})
    for number in range(10):
        engine.add(f"row {number}", prompt(10 + number, 20), 20, priority=1)
    engine.run()
    ends = {round(engine.ended_at[name], 1) for name in engine.ended_at if "row" in name or "live" in name}
    assert max(ends) - min(ends) < 0.2


def test_without_live_requests_rows_take_whole_steps(start: Start) -> None:
    engine = start()
    learn(engine)
    engine.time.sleep(60.0)
    for number in range(20):
        engine.add(f"row {number}", prompt(number, 1000), 1, priority=1)
    began = engine.time.now
    engine.run()
    assert engine.time.now - began == pytest.approx(20_000 * 0.00025 + 10 * 0.05, rel=0.05)


def test_a_live_request_takes_the_place_of_the_youngest_row(start: Start) -> None:
    engine = start(max_num_seqs=4)
    rows = [f"row {number}" for number in range(4)]
    alone = {name: engine.answer(prompt(number, 50), 100) for number, name in enumerate(rows)}
    for number, name in enumerate(rows):
        engine.add(name, prompt(number, 50), 100, priority=1)
    go_on(engine, 1.0)
    sent = engine.time.now
    engine.add("live", prompt(9, 50), 10)
    engine.run()
    assert engine.seen_at["live"][0] - sent < 0.2
    assert engine.ended_at["row 3"] > engine.ended_at["live"]
    assert {name: engine.tokens[name] for name in rows} == alone


def test_the_scheduler_tells_what_it_did_and_learned(start: Start) -> None:
    engine = start(max_num_seqs=4)
    learn(engine)
    for number in range(4):
        engine.add(f"row {number}", prompt(number, 50), 100, priority=1)
    go_on(engine, 1.0)
    engine.add("live", prompt(9, 50), 10, extra_args={GOALS: (0.0, 0.08)})
    engine.add("wrong", prompt(9, 50), 10, extra_args={GOALS: "fast"})
    go_on(engine, 0.3)
    replica = VLLMEngine.__new__(VLLMEngine)
    replica.stats = EngineStats("demo")
    stats = engine.scheduler.make_stats()
    replica.stats.record(stats, None)
    figures = replica.scheduler
    assert figures is not None
    assert figures.bound_s == pytest.approx(0.08)
    assert (figures.displaced, figures.malformed) == (2, 1)
    assert figures.step_s.base == pytest.approx(0.05, rel=0.02)
    assert figures.step_s.prompt_token == pytest.approx(0.00025, rel=0.05)
    assert figures.least_s == pytest.approx(0.1, rel=0.02)
    # vLLM's own loggers don't see them.
    assert not any(stats.num_kv_fetch_reqs_by_stage.values())


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in turn"])
def test_the_time_of_a_step_is_that_of_one_stage(ahead: bool) -> None:
    with virtual_engines(engine_of(Stages, LiveFirstEngine)) as start:
        engine = start(engine=PRIORITY, **DEVICE | {"async_scheduling": ahead})
        # Alone, a step passes the stages. Behind others, it ends one stage after them.
        learn(engine)
        for number in range(30):
            engine.add(f"row {number}", prompt(number, 600), 30, priority=1)
        go_on(engine, 1.0)
        engine.add("live", prompt(99, 50), 30, extra_args={GOALS: (0.0, 0.3)})
        engine.run()
        base, per_prompt_token, *_ = engine.scheduler.times.line
        assert base == pytest.approx(0.05 / STAGES, rel=0.03)
        assert per_prompt_token == pytest.approx(0.00025 / STAGES, rel=0.05)
        # Rows in another stage aren't in the step anyway, and count as nothing in it.
        assert engine.scheduler.figures["left_out"] == 0


def test_a_live_request_takes_the_blocks_of_the_youngest_rows(start: Start) -> None:
    engine = start(kv_tokens=4096, max_model_len=2048)
    for number in range(10):
        engine.add(f"row {number}", prompt(number, 350), 50, priority=1)
    go_on(engine, 1.3)
    sent = engine.time.now
    engine.add("live", prompt(99, 1500), 5)
    engine.run()
    assert engine.seen_at["live"][0] - sent < 1.2
    assert all(len(engine.tokens[f"row {number}"]) == 50 for number in range(10))


def test_decodes_beyond_the_goal_are_left_out_and_end_all_the_same(start: Start) -> None:
    engine = start(per_sequence_ms=2.0)
    learn(engine)
    for number in range(60):
        engine.add(f"row {number}", prompt(number, 20), 40, priority=1)
    go_on(engine, 2.0)
    engine.add("live", prompt(99, 20), 40, extra_args={GOALS: (0.0, 0.1)})
    engine.run()
    gaps = [later - earlier for earlier, later in pairwise(engine.seen_at["live"])]
    assert sorted(gaps)[len(gaps) // 2] < 0.11
    # The rows that are left out are the youngest ones.
    ends = [engine.ended_at[f"row {number}"] for number in range(60)]
    assert ends == sorted(ends)
    assert all(len(engine.tokens[f"row {number}"]) == 40 for number in range(60))


def test_a_goal_that_no_step_holds_lets_rows_go_on(start: Start) -> None:
    engine = start()
    learn(engine)
    engine.add("live", prompt(1, 50), 400, extra_args={GOALS: (0.0, 0.001)})
    engine.add("row", prompt(2, 200), 20, priority=1)
    engine.run()
    assert engine.ended_at["row"] < engine.ended_at["live"]


def test_the_next_step_is_decided_just_before_the_running_one_ends(start: Start) -> None:
    engine = start()
    engine.submit_s = 0.001
    learn(engine)
    engine.add("first", prompt(1, 50), 100)
    go_on(engine, 1.0)
    waits = []
    for number in range(20):
        sent, name = engine.time.now, f"live {number}"
        # vLLM's loop waits here, and takes in what has come meanwhile.
        assert engine.busy
        waited = engine.time.now - sent
        engine.add(name, prompt(10 + number, 10), 2)
        engine.step()
        while not engine.seen_at[name]:
            assert engine.busy
            engine.step()
        waits.append((waited, engine.seen_at[name][0] - sent))
    held, first = zip(*waits, strict=True)
    assert sorted(held)[10] > 0.03
    # The rest of the step and its own: without the hold, a whole step more.
    assert max(first) < 2.2 * 0.055


def test_a_decision_is_held_for_the_same_throughput(start: Start) -> None:
    engine = start()
    engine.submit_s = 0.001
    learn(engine)
    engine.add("live", prompt(1, 50), 300)
    engine.run()
    gaps = [later - earlier for earlier, later in pairwise(engine.seen_at["live"])]
    assert sum(gaps[100:]) / 199 == pytest.approx(0.0501, rel=0.02)


def test_a_line_that_is_too_long_is_found_out(start: Start) -> None:
    engine = start()
    engine.submit_s = 0.001
    learn(engine)
    # The device is three times as fast from now on, which a decision that comes too late would not show.
    engine.core.model_executor._device.profile = engine.core.model_executor._device.profile.model_copy(
        update={"base_ms": 16.0}
    )
    engine.add("live", prompt(1, 50), 600)
    engine.run()
    gaps = [later - earlier for earlier, later in pairwise(engine.seen_at["live"])]
    assert sum(gaps[500:]) / 99 == pytest.approx(0.0161, rel=0.1)


def test_answers_of_one_token_correct_a_line_that_is_too_long(start: Start) -> None:
    """No step follows theirs, so the decision that was held back for one is not seen to come too late."""
    engine = start()
    engine.submit_s = 0.001
    learn(engine)
    engine.core.model_executor._device.profile = engine.core.model_executor._device.profile.model_copy(
        update={"per_prefill_token_ms": 0.05}
    )
    waits = []
    for number in range(40):
        sent = engine.time.now
        engine.answer(prompt(2000 + number, 1000), 1)
        waits.append(engine.time.now - sent)
    assert waits[-1] == pytest.approx(0.1, rel=0.15), waits


def test_rows_alone_are_decided_at_once(start: Start) -> None:
    engine = start()
    learn(engine)
    engine.time.sleep(60.0)
    engine.add("row", prompt(1, 50), 10, priority=1)
    while engine.busy:
        before = engine.time.now
        assert engine.busy
        assert engine.time.now - before < 0.005
        engine.step()


def test_few_rows_are_preempted_where_the_cache_is_too_small(start: Start) -> None:
    engine = start(kv_tokens=4096, max_model_len=1024)
    alone = [engine.answer(prompt(number, 100), 60) for number in range(24)]
    preempted = []
    preempt = engine.scheduler._preempt_request

    def seen(request: Any, *arguments: Any, **options: Any) -> None:
        preempted.append(request)
        preempt(request, *arguments, **options)

    engine.scheduler._preempt_request = seen
    for number in range(24):
        engine.add(f"row {number}", prompt(number, 100), 60 + 20 * (number < 4), priority=1)
    engine.run()
    assert [engine.tokens[f"row {number}"][:60] for number in range(24)] == alone
    assert len(preempted) <= 2


def test_rows_that_live_requests_keep_out_come_in_their_turn(start: Start) -> None:
    engine = start(max_num_seqs=2)
    engine.add("row", prompt(1, 50), 3, priority=1)
    for number in range(40):
        engine.add(f"live {number}", prompt(2 + number, 50), 20)
    engine.run()
    waited = engine.ended_at["row"]
    assert 10.0 < waited < 15.0
    assert waited < engine.ended_at["live 39"]


def test_rows_with_adapters_stay_where_there_are_more_adapters_than_slots(start: Start) -> None:
    engine = start(engine={"enable_lora": True, "max_loras": 1}, per_sequence_ms=5.0)
    learn(engine)
    adapters = [LoRARequest(f"adapter {number}", number + 1, f"/{number}") for number in range(2)]
    for adapter in adapters:
        assert engine.core.add_lora(adapter)
    for number in range(12):
        engine.add(f"row {number}", prompt(number, 30), 30, adapters[0], priority=1)
    go_on(engine, 1.0)
    engine.add("live", prompt(50, 30), 30, adapters[1], extra_args={GOALS: (0.0, 0.06)})
    engine.run()
    assert len(engine.tokens["live"]) == 30
    assert all(len(engine.tokens[f"row {number}"]) == 30 for number in range(12))


FEATURES: dict[str, tuple[dict[str, Any], type[SimulatedExecutor]]] = {
    "none": ({}, SimulatedExecutor),
    "parts": ({"long_prefill_token_threshold": 32}, SimulatedExecutor),
    "windows": ({}, Windows),
    "store": ({"kv_transfer_config": STORE}, Loading),
    "drafts": ({"speculative_config": DRAFTS}, Drafts),
    "stages": ({}, Stages),
    "images": ({}, FewImages),
}
"""Features of vLLM: options, and the device."""

REQUESTS = st.lists(
    st.tuples(
        st.integers(-1, 2),  # priority
        st.integers(1, 300),  # tokens of the prompt
        st.integers(1, 60),  # tokens of the answer
        st.floats(0, 0.6),  # seconds until the next request
        st.integers(0, 3),  # adapter; 0: none
    ),
    min_size=1,
    max_size=30,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=REQUESTS,
    places=st.integers(1, 8),
    blocks=st.integers(24, 60),
    ahead=st.booleans(),
    goal=st.sampled_from([0.0, 0.02, 0.08, 0.3]),
    runner_2=st.booleans(),
    slots=st.integers(0, 3),
    feature=st.sampled_from(list(FEATURES)),
)
def test_nothing_is_lost_and_each_answer_is_as_if_it_were_alone(
    requests: list[tuple[int, int, int, float, int]],
    places: int,
    blocks: int,
    ahead: bool,
    goal: float,
    runner_2: bool,
    slots: int,
    feature: str,
) -> None:
    options, executor = FEATURES[feature]
    with virtual_engines(engine_of(executor, LiveFirstEngine)) as begin:
        tight = {
            "kv_tokens": 16 * blocks,
            "max_model_len": 384,
            "max_num_seqs": places,
            "async_scheduling": ahead and feature != "drafts",
        }
        lora = {"enable_lora": True, "max_loras": slots} if slots else {}
        engine = begin(engine=PRIORITY | lora | options, **DEVICE | tight)
        engine.scheduler.use_v2_model_runner = runner_2 or feature == "stages"
        adapters = [
            None,
            *(LoRARequest(f"adapter {each}", each, f"/{each}") for each in range(1, 4) if slots),
        ]
        for each in adapters[1:]:
            assert engine.core.add_lora(each)
        names = [str(number) for number in range(len(requests))]
        alone = [engine.answer(prompt(number, each[1]), each[2]) for number, each in enumerate(requests)]
        for number, (priority, tokens, output, pause, adapter) in enumerate(requests):
            told = {"extra_args": {GOALS: (0.0, goal)}} if goal else {}
            own = adapters[adapter % len(adapters)]
            shown = (
                [image(str(number % 3), tokens // 2, tokens // 3)]
                if feature == "images" and tokens > 2
                else []
            )
            engine.add(names[number], prompt(number, tokens), output, own, priority, shown, **told)
            go_on(engine, pause)
        engine.run()
        assert [engine.tokens[name] for name in names] == alone
        assert not engine.scheduler.running
        assert engine.scheduler.kv_cache_manager.usage == 0.0


@pytest.mark.parametrize("device", ["l4-7b", "h100-7b"])
def test_the_requests_of_a_profile_teach_all_four_times(start: Start, device: str) -> None:
    profile = PROFILES[device]
    engine = start(**profile.model_dump(exclude={"load_s"}))
    for wave, (count, tokens) in enumerate(WAVES):
        for number in range(count):
            engine.add(f"{wave} {number}", prompt(1000 * wave + number, tokens), ANSWER)
        engine.run()
    line = engine.scheduler.times.line
    assert engine.scheduler.times.error < 0.05
    for sequences in (1, 32, 256):
        for prompts in (0, 512, 2048):
            for context in (64 * sequences, 1024 * sequences):
                work = Work(prompts, sequences, context)
                assert line.seconds(work) == pytest.approx(profile.step.seconds(work), rel=0.05)
