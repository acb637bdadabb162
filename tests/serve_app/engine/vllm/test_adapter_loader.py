"""Adapters that go into an engine and out of it."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.engine.adapter_copies import AdapterFiles
from serve_app.engine.adapter_files import Adapter, AdapterError
from serve_app.engine.adapter_slots import AdapterSlots
from serve_app.engine.vllm.adapter_loader import AdapterLoader
from serve_app.engine.vllm.adapter_worker import UNUSED
from serve_app.ledger.calls import CallBook
from serve_app.settings.adapters import AdapterSettings
from tests.progress import STILL_S
from tests.serve_app.engine.lora_doubles import FakeLLM, has_files, source

LIMIT_S = STILL_S


def made() -> tuple[AdapterLoader, FakeLLM]:
    llm = FakeLLM()
    return AdapterLoader(llm, AdapterFiles(), {}, AdapterSlots(2), CallBook("demo"), simulated=True), llm


async def test_each_adapter_has_a_number_and_files_of_its_own_until_it_is_unloaded(tmp_path: Path) -> None:
    loader, llm = made()
    settings = source(tmp_path, "words")
    first, second = [await loader.load("words", settings) for _ in range(2)]
    assert sorted(llm.loaded) == [1, 2]
    await loader.unload(first)
    assert sorted(llm.loaded) == [2]
    assert (has_files(first.request), has_files(second.request)) == (False, True)
    await loader.close()
    assert not has_files(second.request)


async def test_an_adapter_that_was_fetched_before_is_fetched_once(tmp_path: Path) -> None:
    llm, files = FakeLLM(), AdapterFiles()
    settings = source(tmp_path, "words")
    fetched = files.fetch(settings)
    loader = AdapterLoader(llm, files, {"words": fetched}, AdapterSlots(2), CallBook("demo"), simulated=True)
    assert (await loader.load("words", settings)).request.lora_path == str(fetched.path)
    assert (await loader.load("words", settings)).request.lora_path != str(fetched.path)
    await loader.close()


@pytest.mark.parametrize(("rank", "reason"), [(9, "rank 9"), (4, "refused by vLLM: no such module")])
async def test_an_adapter_that_does_not_fit_leaves_no_files(tmp_path: Path, rank: int, reason: str) -> None:
    llm, files = FakeLLM(), AdapterFiles()
    settings = source(tmp_path, "words", rank=rank)
    fetched = files.fetch(settings)
    loader = AdapterLoader(llm, files, {"words": fetched}, AdapterSlots(2), CallBook("demo"), simulated=True)
    llm.refuse = True
    with pytest.raises(AdapterError, match=reason):
        await loader.load("words", settings)
    assert not fetched.path.exists()
    await loader.close()


async def test_a_load_that_is_cancelled_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, llm = made()
    settings = source(tmp_path, "words")
    loop = asyncio.get_running_loop()
    begun, deleted, go = asyncio.Event(), asyncio.Event(), threading.Event()
    fetch, delete = AdapterFiles.fetch, shutil.rmtree
    copies: list[Path] = []

    def slow(files: AdapterFiles, settings: AdapterSettings) -> Adapter:
        loop.call_soon_threadsafe(begun.set)
        assert go.wait(LIMIT_S)
        adapter = fetch(files, settings)
        copies.append(adapter.path)
        return adapter

    def tell(path: Path, **options: Any) -> None:
        delete(path, **options)
        deleted.set()

    monkeypatch.setattr(AdapterFiles, "fetch", slow)
    monkeypatch.setattr("shutil.rmtree", tell)
    async with asyncio.timeout(LIMIT_S):
        loading = asyncio.ensure_future(loader.load("words", settings))
        await begun.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        # Its thread goes on.
        go.set()
        await deleted.wait()
    assert [copy.exists() for copy in copies] == [False]
    assert llm.names == []
    await loader.close()


async def test_a_pinned_adapter_stays_on_the_device(tmp_path: Path) -> None:
    loader, llm = made()
    one = await loader.load("words", source(tmp_path, "words"))
    await loader.pin(one)
    assert llm.pinned == [1]
    await loader.close()


class Device(FakeLLM):
    """An engine on a device, with two workers.

    Attributes:
        unused: The tensors that each worker has no use for.
        logprob: What a trial request gives.
        tried: The names of the adapters of the trials.
        slots: The slots of its adapters; `held` are those that the last trial found.
        checked: Set when the workers are asked for the tensors.
    """

    def __init__(self, unused: Sequence[Sequence[str]] = ((), ()), logprob: float = -0.5) -> None:
        super().__init__()
        self.unused = unused
        self.logprob = logprob
        self.tried: list[str] = []
        self.slots = AdapterSlots(1)
        self.held: list[str] = []
        self.checked = asyncio.Event()
        self.output_processor = SimpleNamespace()
        self.model_config = SimpleNamespace(
            # Its layers are those of no model that transformers knows.
            hf_config=SimpleNamespace(get_text_config=object),
            max_model_len=16,
        )

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(encode=lambda text: [*text.encode()])

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def collective_rpc(self, method: str, args: tuple[str]) -> Sequence[Sequence[str]]:
        assert (method, *args) == (UNUSED, *(one.lora_path for one in self.loaded.values()))
        self.checked.set()
        return self.unused

    async def generate(self, prompt: Any, params: Any, _: str, *, lora_request: Any) -> AsyncIterator[Any]:
        assert len(prompt["prompt_token_ids"]) + params.max_tokens <= 16
        assert lora_request.lora_int_id in self.loaded
        self.tried.append(lora_request.lora_name)
        self.held = self.slots.resident
        place = {7: SimpleNamespace(logprob=self.logprob)}
        sure = {8: SimpleNamespace(logprob=0.0)}
        yield SimpleNamespace(
            prompt_logprobs=[None, sure, place], outputs=[SimpleNamespace(logprobs=[sure, sure])]
        )


OnDevice = Callable[[Device], AdapterLoader]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> OnDevice:
    monkeypatch.setattr(AsyncLLM, "generate", Device.generate)

    def made(llm: Device) -> AdapterLoader:
        return AdapterLoader(llm, AdapterFiles(), {}, llm.slots, CallBook("demo"), simulated=False)

    return made


async def test_an_adapter_is_tried_in_a_slot_by_its_own_name(tmp_path: Path, on_device: OnDevice) -> None:
    loader = on_device(llm := Device(unused=(("a",), ("b",))))
    one = await loader.load("words", source(tmp_path, "words"))
    assert (llm.tried, llm.held, llm.slots.resident) == (["trial of words"], ["trial of words"], [])
    assert one.request.lora_name == "words"
    await loader.close()


@pytest.mark.parametrize(
    ("llm", "reason"),
    [
        (Device(logprob=float("nan")), "not finite .*: a trial request with it failed"),
        (Device(unused=(("a", "b"), ("b", "c"))), "no place for: b. Their"),
        (Device(unused=([f"a{n}" for n in range(9)],)), "no place for: a0, a1, a2, a3, a4 and 4 more"),
    ],
)
async def test_an_adapter_that_fails_inside_vllm_leaves_nothing(
    tmp_path: Path, on_device: OnDevice, llm: Device, reason: str
) -> None:
    loader = on_device(llm)
    with pytest.raises(AdapterError, match=reason):
        await loader.load("words", source(tmp_path, "words"))
    assert (llm.names, llm.slots.resident, llm.removed.is_set()) == ([], [], True)
    await loader.close()


async def test_a_load_that_is_cancelled_inside_vllm_is_removed_there(
    tmp_path: Path, on_device: OnDevice
) -> None:
    loader = on_device(llm := Device())
    async with llm.slots.using("other"), asyncio.timeout(LIMIT_S):
        loading = asyncio.ensure_future(loader.load("words", source(tmp_path, "words")))
        await llm.checked.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
    assert (llm.names, llm.tried, llm.slots.waiting) == ([], [], 0)
    await loader.close()


async def test_an_adapter_that_vllm_may_still_have_keeps_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader, llm = made()
    one = await loader.load("words", source(tmp_path, "words"))
    llm.keep = True
    with caplog.at_level("ERROR", "ray.serve"):
        await loader.unload(one)
    assert has_files(one.request)
    (record,) = caplog.records
    assert "words could not be removed from vLLM" in record.getMessage()
    assert record.exc_info
    await loader.close()
    assert not has_files(one.request)
