"""The executor under vLLM's own scheduler."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from serve_app.engine.vllm.options import vllm_args
from serve_app.settings.models import LLMSettings
from serve_app.simulation.vllm_executor import SimulatedExecutor
from tests.serve_app.simulation.virtual import NUMBERS
from tests.serve_app.simulation.virtual_engine import VirtualEngine, virtual_engines

PROMPT = list(range(65, 115))
"""50 tokens."""


@pytest.fixture
def start() -> Iterator[Callable[..., VirtualEngine]]:
    with virtual_engines() as start:
        yield start


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "async scheduling"])
def test_a_request_takes_the_time_of_the_profile(start: Callable[..., VirtualEngine], ahead: bool) -> None:
    engine = start(async_scheduling=ahead)
    assert engine.time.now == 7.0
    engine.add("a", PROMPT, 3)
    engine.run()
    # The prompt: 10 ms, 50 times 0.5 ms, one sequence 2 ms, 50 times 0.25 ms. Then 51 and 52 tokens.
    first = 7.0 + 0.0495
    assert engine.seen_at["a"] == pytest.approx([first, first + 0.02475, first + 0.02475 + 0.025])
    assert len(engine.tokens["a"]) == 3


@pytest.mark.parametrize(("ahead", "step_s"), [(False, 0.017), (True, 0.012)])
def test_async_scheduling_hides_the_time_of_vllm_behind_the_step(
    start: Callable[..., VirtualEngine], ahead: bool, step_s: float
) -> None:
    engine = start(async_scheduling=ahead, per_kv_token_ms=0.0)
    engine.host_s = 0.005
    engine.add("a", PROMPT, 20)
    engine.run()
    *_, earlier, last = engine.seen_at["a"]
    assert last - earlier == pytest.approx(step_s)


def test_sequences_share_a_step(start: Callable[..., VirtualEngine]) -> None:
    engine = start(per_prefill_token_ms=0.0, per_kv_token_ms=0.0)
    for name in "abc":
        engine.add(name, PROMPT, 2)
    engine.run()
    assert [engine.seen_at[name] for name in "abc"] == [pytest.approx([7.016, 7.032])] * 3


def test_adapters_share_a_step_as_far_as_there_are_slots(start: Callable[..., VirtualEngine]) -> None:
    lora = {"enable_lora": True, "max_loras": 2}
    engine = start(engine=lora, per_prefill_token_ms=0.0, per_kv_token_ms=0.0)
    for number, name in enumerate("abc", start=1):
        adapter = LoRARequest(name, number, f"/adapters/{name}")
        assert engine.core.add_lora(adapter)
        engine.add(name, PROMPT, 2, adapter)
    engine.run()
    assert engine.seen_at["a"] == engine.seen_at["b"] == pytest.approx([7.014, 7.028])
    assert engine.seen_at["c"][0] > 7.028
    engine.core.sleep(1)
    with pytest.raises(RuntimeError, match="while the model sleeps"):
        engine.core.add_lora(LoRARequest("d", 4, "/adapters/d"))
    assert [len(engine.tokens[name]) for name in "abc"] == [2, 2, 2]


def test_a_long_prompt_is_computed_in_chunks(start: Callable[..., VirtualEngine]) -> None:
    engine = start(max_num_batched_tokens=16, max_num_seqs=8, per_kv_token_ms=0.0)
    engine.add("a", PROMPT, 1)
    engine.run()
    assert engine.seen_at["a"] == pytest.approx([7.0 + 4 * 0.012 + 50 * 0.0005])


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "async scheduling"])
def test_an_answer_depends_on_its_prompt_alone(start: Callable[..., VirtualEngine], ahead: bool) -> None:
    engine = start(async_scheduling=ahead)
    alone = engine.answer(PROMPT)
    assert all(97 <= token <= 122 for token in alone)
    for number in range(5):
        engine.add(f"other-{number}", [number] * (20 + number), 20)
    assert engine.answer(PROMPT) == alone
    assert engine.answer(PROMPT + alone[:7], 13) == alone[7:]
    assert engine.answer([*PROMPT, 1]) != alone


def test_a_prefix_is_cached(start: Callable[..., VirtualEngine]) -> None:
    engine = start()
    engine.add("first", PROMPT, 1)
    engine.run()
    engine.add("second", [*PROMPT, 7], 1)
    before = engine.time.now
    engine.run()
    # Three blocks of 16 tokens are cached; three tokens are left of 51.
    assert (engine.cached["first"], engine.cached["second"]) == (0, 48)
    assert engine.time.now - before == pytest.approx((10 + 3 * 0.5 + 2 + 51 * 0.25) / 1000)


@pytest.mark.parametrize("v2", [False, True], ids=["runner 1", "runner 2"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "async scheduling"])
def test_requests_are_preempted_and_go_on_with_the_same_tokens(
    start: Callable[..., VirtualEngine], monkeypatch: pytest.MonkeyPatch, ahead: bool, v2: bool
) -> None:
    engine = start(kv_tokens=512, max_model_len=256, async_scheduling=ahead)
    # vLLM's newer runner, on a GPU, gets a preempted request like a new one.
    engine.core.scheduler.use_v2_model_runner = v2
    alone = [engine.answer([number] * 60, 150) for number in range(5)]
    for number in range(5):
        engine.add(str(number), [number] * 60, 150)
    preempted = count_preemptions(engine, monkeypatch)
    engine.run()
    assert preempted
    assert [engine.tokens[str(number)] for number in range(5)] == alone


def test_a_token_that_preemption_lost_comes_again(start: Callable[..., VirtualEngine]) -> None:
    engine = start()
    executor = engine.core.model_executor
    engine.add("a", PROMPT, 5)
    first = engine.core.scheduler.schedule()
    executor.execute_model(first)
    (token,) = executor.sample_tokens(None).sampled_token_ids
    again = SchedulerOutput.make_empty()
    again.num_scheduled_tokens = first.num_scheduled_tokens
    again.total_num_scheduled_tokens = len(PROMPT)
    cached = again.scheduled_cached_reqs
    cached.req_ids.append("a")
    cached.num_computed_tokens.append(0)
    cached.num_output_tokens.append(0)
    executor.execute_model(again)
    assert executor.sample_tokens(None).sampled_token_ids == [token]


def count_preemptions(engine: VirtualEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the id of each request that is preempted from now on."""
    found: list[str] = []
    preempt = engine.core.scheduler._preempt_request

    def counted(request: Any, *args: Any, **options: Any) -> Any:
        found.append(request.request_id)
        return preempt(request, *args, **options)

    monkeypatch.setattr(engine.core.scheduler, "_preempt_request", counted)
    return found


def test_the_cache_has_the_tokens_of_the_profile(start: Callable[..., VirtualEngine]) -> None:
    cache = start().core.vllm_config.cache_config
    # One block is vLLM's own.
    assert (cache.num_gpu_blocks - 1) * cache.block_size == 1024


def test_sleep_and_waking_up_take_their_time(start: Callable[..., VirtualEngine]) -> None:
    engine = start()
    alone = engine.answer(PROMPT)
    began = engine.time.now
    engine.core.sleep(1)
    assert engine.time.now - began == pytest.approx(3.0)
    engine.core.wake_up()
    assert engine.time.now - began == pytest.approx(7.0)
    assert engine.answer(PROMPT) == alone


def test_the_cache_wakes_up_with_the_weights(start: Callable[..., VirtualEngine]) -> None:
    engine = start()
    alone = engine.answer(PROMPT)
    engine.core.sleep(2)
    began = engine.time.now
    assert not engine.core.wake_up(["weights"])
    assert engine.time.now - began == pytest.approx(4.0)
    assert engine.core.wake_up(["kv_cache"])
    assert engine.time.now - began == pytest.approx(4.0)
    assert engine.answer(PROMPT) == alone


def test_a_grammar_decides_among_the_tokens_that_it_allows(start: Callable[..., VirtualEngine]) -> None:
    engine = start()
    executor = engine.core.model_executor
    engine.add("a", PROMPT, 5)
    executor.execute_model(engine.core.scheduler.schedule())
    bits = np.zeros((1, 9), dtype=np.int32)
    bits[0, 1] = 1 << 3
    output = executor.sample_tokens(GrammarOutput(["a"], bits))
    assert output.sampled_token_ids == [[35]]


def test_probabilities_are_those_of_letters_that_are_equally_likely(
    start: Callable[..., VirtualEngine],
) -> None:
    engine = start()
    executor = engine.core.model_executor
    engine.add("a", PROMPT, 5, logprobs=2)
    engine.add("b", PROMPT, 5)
    executor.execute_model(engine.core.scheduler.schedule())
    output = executor.sample_tokens(None)
    ids, logprobs, ranks, _ = output.logprobs.slice_request(0, 1)
    assert ids.shape == (1, 3)
    assert ids[0][0] == output.sampled_token_ids[0][0]
    assert logprobs == pytest.approx(np.full((1, 3), -np.log(26)))
    assert list(ranks) == [1]


def test_without_a_profile_it_says_what_is_missing() -> None:
    settings = LLMSettings.model_validate({"id": "demo", "simulate": NUMBERS})
    args = vllm_args(settings)
    args.additional_config = {}
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    with pytest.raises(ValueError, match="additional_config"):
        SimulatedExecutor(config)
