"""The executor under vLLM's own scheduler, in this process and on a clock of the test."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import vllm.envs
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import core as vllm_core

from serve_app.engine.vllm.options import vllm_args
from serve_app.settings.models import LLMSettings
from serve_app.simulation import vllm_executor
from serve_app.simulation.vllm_executor import SimulatedExecutor
from tests.serve_app.simulation.virtual import NUMBERS, VirtualTime

PROMPT = list(range(65, 115))
"""50 tokens."""


class Engine:
    """vLLM's engine core on a simulated device.

    Attributes:
        time: The device's clock.
        core: The engine.
        tokens: Output tokens of each request.
        seen_at: When each came.
        cached: Tokens of each prompt that were in the prefix cache.
        host_s: Seconds that vLLM takes between two steps.
    """

    def __init__(self, time: VirtualTime, engine: dict[str, Any] | None = None, **fields: Any) -> None:
        content = {"id": "demo", "simulate": NUMBERS | fields, "engine": engine or {}}
        settings = LLMSettings.model_validate(content)
        args = AsyncEngineArgs.from_cli_args(vllm_args(settings))
        # The service's own scheduler holds tokens, and these tests look at each of them.
        args.scheduler_cls = None
        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        self.time = time
        self.core = vllm_core.EngineCore(config, SimulatedExecutor, log_stats=True)
        self.tokens: dict[str, list[int]] = {}
        self.seen_at: dict[str, list[float]] = {}
        self.cached: dict[str, int] = {}
        self.host_s = 0.0

    def add(
        self, name: str, prompt: list[int], max_tokens: int, adapter: LoRARequest | None = None, **fields: Any
    ) -> None:
        """Add a request."""
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA, **fields
        )
        asked = EngineCoreRequest(name, prompt, None, params, None, time.time(), adapter, None, None)
        self.core.add_request(*self.core.preprocess_add_request(asked))
        self.tokens[name], self.seen_at[name] = [], []

    def run(self) -> None:
        """Run until all requests are done."""
        for _ in range(10_000):
            if not self.core.scheduler.has_requests() and not self.core.batch_queue:
                return
            outputs, _ = self.core.step_fn()
            self.time.sleep(self.host_s)
            for each in (outputs or {}).values():
                for output in each.outputs:
                    self.tokens[output.request_id] += output.new_token_ids
                    self.seen_at[output.request_id].append(self.time.now)
                    if output.prefill_stats is not None:
                        self.cached[output.request_id] = output.prefill_stats.num_cached_tokens
        raise AssertionError("the requests don't end")

    def answer(self, prompt: list[int], max_tokens: int = 20, **fields: Any) -> list[int]:
        """Return the tokens that one request gets."""
        name = f"request-{len(self.tokens)}"
        self.add(name, prompt, max_tokens, **fields)
        self.run()
        return self.tokens[name]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    clock = VirtualTime()
    monkeypatch.setattr(vllm_executor, "Device", clock.device)
    # It walks through every object of this process.
    monkeypatch.setattr(vllm_core, "freeze_gc_heap", lambda: None)
    started: list[Engine] = []

    def start(**fields: Any) -> Engine:
        started.append(Engine(clock, **fields))
        return started[-1]

    yield start
    for engine in started:
        engine.core.scheduler.shutdown()
    vllm.envs.disable_envs_cache()


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "async scheduling"])
def test_a_request_takes_the_time_of_the_profile(start: Callable[..., Engine], ahead: bool) -> None:
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
    start: Callable[..., Engine], ahead: bool, step_s: float
) -> None:
    engine = start(async_scheduling=ahead, per_kv_token_ms=0.0)
    engine.host_s = 0.005
    engine.add("a", PROMPT, 20)
    engine.run()
    *_, earlier, last = engine.seen_at["a"]
    assert last - earlier == pytest.approx(step_s)


def test_sequences_share_a_step(start: Callable[..., Engine]) -> None:
    engine = start(per_prefill_token_ms=0.0, per_kv_token_ms=0.0)
    for name in "abc":
        engine.add(name, PROMPT, 2)
    engine.run()
    assert [engine.seen_at[name] for name in "abc"] == [pytest.approx([7.016, 7.032])] * 3


def test_adapters_share_a_step_as_far_as_there_are_slots(start: Callable[..., Engine]) -> None:
    lora = {"enable_lora": True, "max_loras": 2}
    engine = start(engine=lora, per_prefill_token_ms=0.0, per_kv_token_ms=0.0)
    for number, name in enumerate("abc", start=1):
        adapter = LoRARequest(name, number, f"/adapters/{name}")
        assert engine.core.add_lora(adapter)
        engine.add(name, PROMPT, 2, adapter)
    engine.run()
    assert engine.seen_at["a"] == engine.seen_at["b"] == pytest.approx([7.014, 7.028])
    assert engine.seen_at["c"][0] > 7.028
    assert [len(engine.tokens[name]) for name in "abc"] == [2, 2, 2]


def test_a_long_prompt_is_computed_in_chunks(start: Callable[..., Engine]) -> None:
    engine = start(max_num_batched_tokens=16, max_num_seqs=8, per_kv_token_ms=0.0)
    engine.add("a", PROMPT, 1)
    engine.run()
    assert engine.seen_at["a"] == pytest.approx([7.0 + 4 * 0.012 + 50 * 0.0005])


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "async scheduling"])
def test_an_answer_depends_on_its_prompt_alone(start: Callable[..., Engine], ahead: bool) -> None:
    engine = start(async_scheduling=ahead)
    alone = engine.answer(PROMPT)
    assert all(97 <= token <= 122 for token in alone)
    for number in range(5):
        engine.add(f"other-{number}", [number] * (20 + number), 20)
    assert engine.answer(PROMPT) == alone
    assert engine.answer(PROMPT + alone[:7], 13) == alone[7:]
    assert engine.answer([*PROMPT, 1]) != alone


def test_a_prefix_is_cached(start: Callable[..., Engine]) -> None:
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
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, ahead: bool, v2: bool
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


def test_a_token_that_preemption_lost_comes_again(start: Callable[..., Engine]) -> None:
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


def count_preemptions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the id of each request that is preempted from now on."""
    found: list[str] = []
    preempt = engine.core.scheduler._preempt_request

    def counted(request: Any, *args: Any, **options: Any) -> Any:
        found.append(request.request_id)
        return preempt(request, *args, **options)

    monkeypatch.setattr(engine.core.scheduler, "_preempt_request", counted)
    return found


def test_the_cache_has_the_tokens_of_the_profile(start: Callable[..., Engine]) -> None:
    cache = start().core.vllm_config.cache_config
    # One block is vLLM's own.
    assert (cache.num_gpu_blocks - 1) * cache.block_size == 1024


def test_sleep_and_waking_up_take_their_time(start: Callable[..., Engine]) -> None:
    engine = start()
    alone = engine.answer(PROMPT)
    began = engine.time.now
    engine.core.sleep(1)
    assert engine.time.now - began == pytest.approx(3.0)
    engine.core.wake_up()
    assert engine.time.now - began == pytest.approx(7.0)
    assert engine.answer(PROMPT) == alone


def test_the_cache_wakes_up_with_the_weights(start: Callable[..., Engine]) -> None:
    engine = start()
    alone = engine.answer(PROMPT)
    engine.core.sleep(2)
    began = engine.time.now
    assert not engine.core.wake_up(["weights"])
    assert engine.time.now - began == pytest.approx(4.0)
    assert engine.core.wake_up(["kv_cache"])
    assert engine.time.now - began == pytest.approx(4.0)
    assert engine.answer(PROMPT) == alone


def test_a_grammar_decides_among_the_tokens_that_it_allows(start: Callable[..., Engine]) -> None:
    engine = start()
    executor = engine.core.model_executor
    engine.add("a", PROMPT, 5)
    executor.execute_model(engine.core.scheduler.schedule())
    bits = np.zeros((1, 9), dtype=np.int32)
    bits[0, 1] = 1 << 3
    output = executor.sample_tokens(GrammarOutput(["a"], bits))
    assert output.sampled_token_ids == [[35]]


def test_probabilities_are_those_of_letters_that_are_equally_likely(start: Callable[..., Engine]) -> None:
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
