"""The warm-up runs each way to sample, alone and together, and never keeps an engine from starting."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from serve_app.engine.vllm.warm_up import compile_nothing_on_a_cpu, warm_up
from tests.serve_app.engine.vllm_doubles import Script, ScriptedLLM, gated, output

KINDS = 8


def engine(monkeypatch: pytest.MonkeyPatch, script: Script, task: str = "generate") -> Any:
    # It calls the class itself, past the door.
    for method in ("generate", "encode"):
        monkeypatch.setattr(AsyncLLM, method, getattr(ScriptedLLM, method))
    llm: Any = gated(script)

    async def tasks() -> tuple[str, ...]:
        return (task,)

    llm.get_supported_tasks = tasks
    return llm


async def test_each_kind_is_sampled_alone_and_with_others_past_the_door(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script(output(1, 2, finish="length"))
    await warm_up(engine(monkeypatch, script))
    assert len(script.calls) == script.closed == 3 * KINDS
    assert len({call["request_id"] for call in script.calls}) == len(script.calls)
    params = [call["params"] for call in script.calls[:KINDS]]
    assert [one.prompt_logprobs for one in params].count(1) == 1
    assert [one.logprobs for one in params].count(1) == 1
    assert [one.temperature for one in params].count(0.0) >= 1
    assert [one.seed for one in params].count(1) == 1


async def test_what_the_model_excludes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(VLLMValidationError("this model has no logprobs"))
    await warm_up(engine(monkeypatch, script))
    assert len(script.calls) == 3 * KINDS


async def test_an_engine_that_dies_is_no_engine_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineDeadError):
        await warm_up(engine(monkeypatch, Script(EngineDeadError())))


class PoolingConfig(SimpleNamespace):
    """The configuration of a pooling model with one task."""

    pooler_config = None

    def get_pooling_task(self, tasks: tuple[str, ...]) -> str:
        return tasks[0]


@pytest.mark.parametrize("task", ["embed", "classify", "token_embed"])
async def test_a_pooling_model_runs_one_prompt(monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    script = Script(SimpleNamespace())
    llm = engine(monkeypatch, script, task)
    llm.model_config = PoolingConfig()
    await warm_up(llm)
    assert [call["params"].task for call in script.calls] == [task]


async def test_a_pooling_model_that_takes_more_than_a_prompt_is_not_warmed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script()
    llm = engine(monkeypatch, script, "plugin")
    llm.model_config = PoolingConfig()
    await warm_up(llm)
    assert script.calls == []


@pytest.mark.parametrize(
    ("eager", "cpu", "before", "after"),
    [
        (True, True, None, "1"),
        (True, True, "0", "0"),
        (False, True, None, None),
        (True, False, None, None),
    ],
)
def test_nothing_is_compiled_for_an_eager_model_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, eager: bool, cpu: bool, before: str | None, after: str | None
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: cpu)
    monkeypatch.setattr(os, "environ", {} if before is None else {"TORCH_COMPILE_DISABLE": before})
    args: Any = SimpleNamespace(enforce_eager=eager)
    compile_nothing_on_a_cpu(args)
    assert os.environ.get("TORCH_COMPILE_DISABLE") == after
