"""A vLLM engine and its batcher, without vLLM's processes."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.tokenizers import get_tokenizer

from serve_app.engine.adapters import AdapterFiles
from serve_app.engine.vllm.engine import VLLMEngine
from serve_app.engine.vllm.lora import Adapters
from serve_app.ledger.calls import CallBook
from serve_app.settings.models import GoalSettings, LLMSettings
from serve_app.settings.sources import DEMO_MODEL
from serve_app.settings.user_config import BatcherUserConfig, parse_user_config
from tests.serve_app.engine.engine_doubles import opened
from tests.serve_app.engine.vllm_doubles import Script, gated, output


@pytest.fixture
def script() -> Script:
    return Script(output(1, 2, text="ab", finish="stop"))


@pytest.fixture
async def engine(script: Script) -> AsyncIterator[VLLMEngine]:
    # The constructor would start vLLM.
    engine: Any = VLLMEngine.__new__(VLLMEngine)
    settings = LLMSettings(id="demo", source=DEMO_MODEL)
    async with opened() as site:
        engine.batcher, engine.door, engine._texts = site.batcher, site.door, site.texts
        engine.llm = gated(script, site)
        engine.llm.get_tokenizer = lambda: get_tokenizer(settings.path)
        engine._limits = SimpleNamespace(
            capacity=1024, max_running=None, max_queue_size=5_000, tenant_weights={"a": 2.0}
        )
        engine._goals = engine._spans = None
        engine.adapters = Adapters(settings, engine.llm, AdapterFiles(), {}, CallBook("demo"))
        yield engine


async def test_limits_change_while_it_runs_and_return_to_those_of_the_config(engine: VLLMEngine) -> None:
    engine.tune(BatcherUserConfig(capacity_tokens=64, max_running=2))
    assert (engine.batcher.stats.capacity, engine.batcher.stats.max_running) == (64, 2)
    engine.tune(BatcherUserConfig())
    assert engine.batcher.stats.capacity == 1024


async def test_goals_come_change_and_go_while_it_runs(engine: VLLMEngine) -> None:
    goals, own = GoalSettings(ttft_p99_s=0.5), GoalSettings(tpot_p99_s=0.03)
    null = parse_user_config({"batcher": {"goals": None}}).batcher
    changed = BatcherUserConfig(goals=goals)
    for own_goals, tuning, then in (
        (None, changed, {"ttft_p99_s": 0.5}),
        (None, BatcherUserConfig(), None),
        (own, BatcherUserConfig(), {"tpot_p99_s": 0.03}),
        (own, changed, {"ttft_p99_s": 0.5}),
        # Null is stated, in contrast to a field that is left out.
        (own, null, None),
    ):
        engine._goals = own_goals
        engine.tune(tuning)
        assert engine.goals == then


async def test_a_stop_ends_vllm_after_the_batcher(engine: VLLMEngine) -> None:
    ended: list[bool] = []
    llm: Any = engine.llm
    llm.shutdown = lambda *_: ended.append(engine.batcher.is_running)
    await engine.stop(1.0)
    assert ended == [False]
    assert not engine._texts.is_running


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
