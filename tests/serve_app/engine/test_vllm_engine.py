"""Prompts and completions of `/generate` on a vLLM client that the test scripts."""

import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.exceptions import EngineDeadError

from batcher import ContinuousBatcher, Goals
from serve_app.api.errors import RequestError
from serve_app.api.protocol import SamplingFields
from serve_app.engine.adapter_copies import AdapterFiles
from serve_app.engine.tokenizing import TokenizingQueue
from serve_app.engine.vllm_adapters import Adapters
from serve_app.engine.vllm_engine import Completion, VLLMEngine
from serve_app.engine.vllm_options import Limits
from serve_app.settings.models import GoalSettings, LLMSettings
from serve_app.settings.schema import SettingsError
from serve_app.settings.sources import DEMO_MODEL
from serve_app.settings.user_config import BatcherUserConfig
from tests.serve_app.engine.vllm_doubles import CONTEXT, Script, gated, output

PROMPT = list(range(100))


@pytest.fixture
def script() -> Script:
    return Script(output(1, 2, text="ab", finish="stop"))


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch, script: Script) -> AsyncIterator[VLLMEngine]:
    # The constructor would start vLLM.
    engine: Any = VLLMEngine.__new__(VLLMEngine)
    batcher = ContinuousBatcher(capacity=1024, max_queue_size=1)
    await batcher.start()
    engine.batcher = batcher
    engine.llm = gated(monkeypatch, script, batcher)
    engine.max_model_len = CONTEXT
    engine._sampling = {"max_tokens": 16, "temperature": 0.5}
    engine._tokenizer = get_tokenizer(LLMSettings(id="demo", source=DEMO_MODEL).path)
    engine._texts = TokenizingQueue(1)
    await engine._texts.start()
    engine._ids = itertools.count()
    engine._limits = Limits(1024, None, 64, {"a": 2.0})
    engine.adapters = Adapters(LLMSettings(id="demo", source=DEMO_MODEL), engine.llm, AdapterFiles(), {})
    yield engine
    await batcher.stop(drain=False)
    await engine._texts.stop()


async def refusal(engine: VLLMEngine, token_ids: list[int], **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await engine.complete(token_ids, engine.sampling(SamplingFields(**fields)))
    return caught.value


async def test_a_completion_has_text_reason_and_tokens(engine: VLLMEngine) -> None:
    done = await engine.complete(PROMPT, engine.sampling(SamplingFields()))
    assert done == Completion("ab", "stop", 2)


async def test_fields_of_the_request_go_before_those_of_the_config(
    engine: VLLMEngine, script: Script
) -> None:
    await engine.complete(PROMPT, engine.sampling(SamplingFields(max_tokens=3)))
    params = script.calls[0]["params"]
    assert (params.max_tokens, params.temperature) == (3, 0.5)


def test_values_that_vllm_refuses_are_a_400_in_its_words(engine: VLLMEngine) -> None:
    with pytest.raises(RequestError, match="min_tokens") as caught:
        engine.sampling(SamplingFields(max_tokens=1, min_tokens=5))
    assert caught.value.status == 400


async def test_a_default_of_max_tokens_is_reduced_to_what_fits(engine: VLLMEngine, script: Script) -> None:
    prompt = list(range(CONTEXT - 5))
    await engine.complete(prompt, engine.sampling(SamplingFields()))
    assert script.calls[0]["params"].max_tokens == 5


async def test_max_tokens_of_the_request_is_not_reduced_but_refused(engine: VLLMEngine) -> None:
    error = await refusal(engine, list(range(CONTEXT - 5)), max_tokens=6)
    assert error.status == 400
    assert "lower max_tokens to 5" in error.message


@pytest.mark.parametrize("length", [0, CONTEXT, CONTEXT + 1])
async def test_a_prompt_that_is_empty_or_fills_the_context_is_refused(
    engine: VLLMEngine, script: Script, length: int
) -> None:
    assert (await refusal(engine, list(range(length)))).status == 400
    assert script.calls == []


@pytest.mark.parametrize(
    ("failure", "status"),
    [(VLLMValidationError("bad value"), 400), (EngineDeadError(), 503), (None, 500)],
    ids=["the request", "the engine", "no result"],
)
async def test_failures_of_vllm_have_a_status(
    engine: VLLMEngine, script: Script, failure: Exception | None, status: int
) -> None:
    script.results = [] if failure is None else [failure]
    assert (await refusal(engine, PROMPT)).status == status


async def test_a_refusal_of_the_batcher_comes_as_it_is(engine: VLLMEngine) -> None:
    await engine.batcher.stop()
    assert (await refusal(engine, PROMPT)).status == 503


async def test_prompts_are_tokenized_and_one_that_can_not_fit_is_not(engine: VLLMEngine) -> None:
    first, second, third = await engine.tokenize(["1+2", "x" * 100_000, "3"])
    assert isinstance(first, list)
    assert isinstance(third, list)
    assert len(first) == len(third) + 2
    assert isinstance(second, RequestError)
    assert "100000 characters" in second.message


async def test_limits_change_while_it_runs_and_return_to_those_of_the_config(engine: VLLMEngine) -> None:
    engine.tune(BatcherUserConfig(capacity_tokens=64, max_running=2))
    assert (engine.batcher.stats.capacity, engine.batcher.stats.max_running) == (64, 2)
    engine.tune(BatcherUserConfig())
    assert engine.batcher.stats.capacity == 1024


async def test_goals_change_only_where_the_engine_was_started_with_some(engine: VLLMEngine) -> None:
    goals = GoalSettings(ttft_p99_s=0.5)
    with pytest.raises(SettingsError, match=r"user_config\.batcher\.goals: the engine was started without"):
        engine.tune(BatcherUserConfig(capacity_tokens=64, goals=goals))
    assert engine.batcher.stats.capacity == 1024
    engine.batcher = ContinuousBatcher(capacity=1024, goals=Goals(ttft_p99_s=1.0))
    engine._limits = engine._limits._replace(goals=Goals(ttft_p99_s=1.0))
    engine.tune(BatcherUserConfig(goals=goals))
    assert engine.batcher.stats.goal_ttft_s == 0.5
    engine.tune(BatcherUserConfig())
    assert engine.batcher.stats.goal_ttft_s == 1.0


async def test_a_stop_ends_vllm_after_the_batcher(engine: VLLMEngine) -> None:
    ended: list[bool] = []
    llm: Any = engine.llm
    llm.shutdown = lambda *_: ended.append(engine.batcher.is_running)
    await engine.stop(1.0)
    assert ended == [False]


@pytest.mark.parametrize("errored", [False, True])
def test_an_engine_that_failed_has_died(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch, errored: bool
) -> None:
    monkeypatch.setattr(type(engine.llm), "errored", errored)
    assert engine.died is errored


@pytest.mark.parametrize("unfinished", [False, True])
def test_an_engine_is_busy_while_it_has_unfinished_requests(engine: VLLMEngine, unfinished: bool) -> None:
    llm: Any = engine.llm
    llm.output_processor = SimpleNamespace(has_unfinished_requests=lambda: unfinished)
    assert engine.busy is unfinished


def test_the_vocabulary_for_grammars_is_that_of_the_tokenizer(engine: VLLMEngine) -> None:
    engine.llm.vllm_config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
        speculative_config=None,
        model_config=None,
    )
    vocabulary = engine.grammar_vocabulary()
    info = xgrammar.TokenizerInfo.deserialize_json(vocabulary)
    assert info.vocab_size == engine.llm.model_config.get_vocab_size()
    assert b"W" in info.decoded_vocab


def test_a_pooling_model_has_no_vocabulary_for_grammars(engine: VLLMEngine) -> None:
    engine.llm.model_config.runner_type = "pooling"
    assert engine.grammar_vocabulary() == ""
