"""Sleep and wake-up of an engine: the calls that vLLM gets, and what is refused."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.engine.vllm import sleep as vllm_sleep
from serve_app.engine.vllm.sleep import VLLMSleeper, check_sleep_mode, shared_devices
from serve_app.ledger.calls import CallBook
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError
from serve_app.settings.turns import ShareSettings
from tests.serve_app.engine.vllm_doubles import output


class FakeLLM:
    """Notes the calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.answer = [7, 8]
        self.errored = False
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: False)

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(("sleep", level, mode))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))

    async def collective_rpc(self, method: str) -> None:
        self.calls.append(method)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def sleeper(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[VLLMSleeper, FakeLLM]:
    llm = FakeLLM()

    async def generate(self: Any, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        yield output(*self.answer, finish="length")

    monkeypatch.setattr(AsyncLLM, "generate", generate)
    engine: Any = llm
    return VLLMSleeper(engine, ShareSettings(**settings), CallBook("m")), llm


async def test_level_1_sleeps_once_all_requests_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, llm = sleeper(monkeypatch)
    await made.prepare()
    await made.sleep()
    await made.wake_up()
    assert llm.calls == [("sleep", 1, "wait"), ("wake_up", None)]
    assert (made.busy, made.died) == (False, False)
    made.release()
    assert llm.calls[-1] == "shutdown"


async def test_level_2_loads_the_weights_before_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made, llm = sleeper(monkeypatch, sleep_level=2)
    await made.sleep()
    await made.wake_up()
    woken = [("wake_up", ["weights"]), "reload_weights", ("wake_up", ["kv_cache"])]
    assert llm.calls == [("sleep", 2, "wait"), *woken]


async def test_an_answer_that_differs_after_a_sleep_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made, llm = sleeper(monkeypatch, self_check=True)
    await made.prepare()
    await made.sleep()
    await made.wake_up()
    llm.answer = [7, 9]
    with pytest.raises(Exception, match=r"self_check: it answers \[7, 9\], and \[7, 8\] before"):
        await made.wake_up()
    unchecked, llm = sleeper(monkeypatch)
    await unchecked.prepare()
    llm.answer = []
    await unchecked.wake_up()


@pytest.mark.parametrize("available", [False, True])
def test_a_device_without_sleep_mode_is_refused(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_sleep_mode_available=lambda: available, device_name="cpu")
    monkeypatch.setattr(vllm_sleep, "current_platform", platform)
    check_sleep_mode(LLMSettings(id="a", source="s"))
    simulated: Any = {"id": "a", "simulate": "h100-8b", "share": "g"}
    check_sleep_mode(LLMSettings(**simulated))
    shared = LLMSettings(id="a", source="s", share="g")
    if available:
        check_sleep_mode(shared)
        return
    with pytest.raises(SettingsError, match=r"models\[a\].share: vLLM has no sleep mode .* \(cpu\); leave"):
        check_sleep_mode(shared)


@pytest.mark.parametrize(
    ("visible", "engine", "expected"),
    [
        ("", {}, ("GPU-0",)),
        ("3,5", {}, ("GPU-0",)),
        ("3,5,6", {"tensor_parallel_size": 2}, ("GPU-0", "GPU-1")),
        ("MIG-a", {}, ("MIG-a",)),
    ],
)
def test_gpus_have_the_same_names_in_all_containers_of_a_machine(
    visible: str, engine: dict[str, int], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def uuid(number: int) -> str:
        return f"GPU-{number}"

    platform = SimpleNamespace(
        is_cuda=lambda: True, device_control_env_var="CUDA_VISIBLE_DEVICES", get_device_uuid=uuid
    )
    monkeypatch.setattr(vllm_sleep, "current_platform", platform)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings: Any = {"id": "a", "source": "s", "share": "g", "engine": engine}
    assert shared_devices(LLMSettings(**settings), "node") == expected
    simulated: Any = {"id": "a", "simulate": "h100-8b", "share": "g"}
    assert shared_devices(LLMSettings(**simulated), "node") == (f"node:{visible}",)
