"""The adapters of an engine that a test plays."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from batcher import ContinuousBatcher
from serve_app.api.errors import RequestError
from serve_app.engine.adapters import Adapter, AdapterError, AdapterFiles, AdapterFolder, AdapterSlots
from serve_app.engine.vllm.lora import Adapters, lora_options
from serve_app.ledger.calls import CallBook
from serve_app.settings.adapters import AdapterSettings
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError
from tests.progress import STILL_S
from tests.serve_app.engine.adapters import write_adapter


class FakeLLM:
    """Stands for vLLM's engine.

    Attributes:
        loaded: Its adapters, by their numbers.
        refuse: It refuses every adapter.
        keep: It fails to remove any.
        unable: It has failed, and loads no adapter.
        removed: Set when an adapter is removed.
    """

    def __init__(self) -> None:
        lora = SimpleNamespace(max_lora_rank=8, lora_dtype=torch.float32)
        self.vllm_config = SimpleNamespace(lora_config=lora)
        self.loaded: dict[int, LoRARequest] = {}
        self.refuse = False
        self.keep = False
        self.unable = False
        self.removed = asyncio.Event()

    @property
    def errored(self) -> bool:
        return self.unable

    async def add_lora(self, request: LoRARequest) -> bool:
        assert has_files(request)
        if self.unable:
            raise RuntimeError("the device is gone")
        if self.refuse:
            raise RuntimeError("Call to add_lora method failed:\nno such module")
        self.loaded[request.lora_int_id] = request
        return True

    async def remove_lora(self, number: int) -> bool:
        self.removed.set()
        if self.keep:
            raise RuntimeError("Call to remove_lora method failed")
        return self.loaded.pop(number, None) is not None

    @property
    def names(self) -> list[str]:
        return sorted(request.lora_name for request in self.loaded.values())


class Device(FakeLLM):
    """An engine on a device, with two workers.

    Attributes:
        unused: The tensors that each worker has no use for.
        logprob: What a trial request gives.
        tried: The names of the adapters of the trials.
        slots: The slots of its adapters; `held` are those that the last trial found.
        checked: Set when the workers are asked for the tensors.
    """

    slots: AdapterSlots

    def __init__(self, unused: Sequence[Sequence[str]] = ((), ()), logprob: float = -0.5) -> None:
        super().__init__()
        self.unused = unused
        self.logprob = logprob
        self.tried: list[str] = []
        self.held: list[str] = []
        self.checked = asyncio.Event()
        self.output_processor = SimpleNamespace()
        self.model_config = SimpleNamespace(
            max_model_len=16,
        )

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(encode=lambda text: [*text.encode()])

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def collective_rpc(self, method: str, args: tuple[str]) -> Sequence[Sequence[str]]:
        assert (method, *args) == (
            "saturate_unused_tensors",
            *(one.lora_path for one in self.loaded.values()),
        )
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


def has_files(request: LoRARequest) -> bool:
    """Return whether the copy of an adapter is there."""
    return (Path(request.lora_path) / "adapter_model.safetensors").is_file()


def source(tmp_path: Path, name: str, **fields: Any) -> AdapterSettings:
    """Return the settings of an adapter that is written as a source."""
    path = write_adapter(tmp_path / "sources" / name, **fields)
    return AdapterSettings(source=str(path), id=name)


def kept(tmp_path: Path) -> AdapterFolder:
    return AdapterFolder(str(tmp_path / "kept"), "demo")


def model(tmp_path: Path, *names: str, folder: bool = True, **more: Any) -> LLMSettings:
    """Return the settings of a model whose config has the adapters of these names."""
    return LLMSettings.model_validate(
        {
            "id": "demo",
            "source": "x",
            # Its layers aren't known.
            "simulate": "h100-8b",
            "adapters": [{"source": str(write_adapter(tmp_path / "sources" / name))} for name in names],
            **({"adapters_folder": str(tmp_path / "kept")} if folder else {}),
            **more,
        }
    )


def made(tmp_path: Path, *names: str, **more: Any) -> tuple[Adapters, FakeLLM]:
    llm = FakeLLM()
    settings = model(tmp_path, *names, **more)
    return Adapters(settings, llm, AdapterFiles(tmp_path), {}, CallBook("demo")), llm


async def settled(llm: FakeLLM, names: list[str]) -> None:
    async with asyncio.timeout(STILL_S):
        await llm.removed.wait()
    assert llm.names == names


async def waits(batcher: ContinuousBatcher) -> None:
    """Return once a slot waits, after which its task does nothing more."""
    while True:
        if batcher.load.waiting:
            return
        await asyncio.sleep(0)


async def test_adapters_of_a_model_that_sleeps_wait_for_its_turn(tmp_path: Path) -> None:
    """The device has no memory for them meanwhile; the work that waits asks for the turn."""
    settings, llm = model(tmp_path, engine={"enable_lora": True}), FakeLLM()
    async with ContinuousBatcher(capacity=1) as batcher:
        adapters = Adapters(
            settings, llm, AdapterFiles(tmp_path), {}, CallBook("demo"), awake=lambda: batcher.slot(0)
        )

        async def asleep(change: Awaitable[Any], names: list[str]) -> None:
            batcher.pause()
            task = asyncio.ensure_future(change)
            async with asyncio.timeout(STILL_S):
                await waits(batcher)
            assert llm.names == names
            batcher.resume()
            await task

        await asleep(adapters.prepare("demo:a", source(tmp_path, "a")), [])
        assert llm.names == ["demo:a"]
        await asleep(adapters.refresh(), ["demo:a"])
        assert llm.names == []
        kept(tmp_path).write("demo:b", source(tmp_path, "b"))
        await asleep(adapters.refresh(), [])
        assert llm.names == ["demo:b"]
        assert not batcher.load.running
    await adapters.close()


def test_options_follow_from_the_adapters_unless_the_config_has_them(tmp_path: Path) -> None:
    paths = [str(write_adapter(tmp_path / f"{rank}", rank=rank)) for rank in (4, 20)]
    fields = {"id": "demo", "source": "x", "adapters": [{"source": path} for path in paths]}
    files = AdapterFiles(tmp_path)
    options, fetched = lora_options(LLMSettings.model_validate(fields), files)
    worker = {"worker_extension_cls": "serve_app.engine.vllm.lora_worker.LoRAWorker"}
    assert options == {
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 8,
        "max_lora_rank": 32,
        **worker,
    }
    assert {id: adapter.rank for id, adapter in fetched.items()} == {"demo:4": 4, "demo:20": 20}
    engine = {"max_loras": 1, "max_lora_rank": 64, "max_cpu_loras": 3}
    options, _ = lora_options(LLMSettings.model_validate(fields | {"engine": engine}), files)
    assert options == {"enable_lora": True, **engine, **worker}
    options, _ = lora_options(LLMSettings.model_validate(fields | {"simulate": "h100-8b"}), files)
    assert "worker_extension_cls" not in options
    assert lora_options(LLMSettings(id="demo", source="x"), files) == ({}, {})
    none = fields | {"adapters": [{"source": "/no/such", "id": "a"}]}
    with pytest.raises(SettingsError, match=r"models\[demo\]\.adapters: a \(/no/such\) has no file"):
        lora_options(LLMSettings.model_validate(none), files)


async def test_the_adapters_of_the_config_and_of_the_folder_are_served_from_the_start(tmp_path: Path) -> None:
    kept(tmp_path).write("more", source(tmp_path, "more"))
    adapters, llm = made(tmp_path, "words")
    await adapters.start()
    assert sorted(adapters.requests) == ["demo:words", "more"]
    assert llm.names == ["demo:words", "more"]
    assert adapters.lora_request("more").lora_name == "more"
    shown = {one["id"]: (one["root"], one["declared"]) for one in adapters.report()}
    assert shown == {"demo:words": ("words", True), "more": ("more", False)}
    await adapters.close()


async def test_an_adapter_that_was_fetched_before_is_fetched_once(tmp_path: Path) -> None:
    llm, files = FakeLLM(), AdapterFiles(tmp_path)
    settings = model(tmp_path, "words")
    _, fetched = lora_options(settings, files)
    adapters = Adapters(settings, llm, files, fetched, CallBook("demo"))
    await adapters.start()
    assert adapters.requests["demo:words"].lora_path == str(fetched["demo:words"].path)
    await adapters.close()


async def test_a_prepared_adapter_is_served_once_it_is_kept(tmp_path: Path) -> None:
    adapters, llm = made(tmp_path)
    await adapters.start()
    await adapters.prepare("words", wanted := source(tmp_path, "words"))
    assert "words" not in adapters.requests
    assert llm.names == ["words"]
    assert await adapters.keep("words", wanted) == ""
    await adapters.refresh()
    assert "words" in adapters.requests
    with pytest.raises(AdapterError, match="loaded already"):
        await adapters.prepare("words", wanted)
    assert await adapters.keep("words", None) == ""
    await adapters.refresh()
    assert "words" not in adapters.requests
    await settled(llm, [])
    await adapters.close()


async def test_each_adapter_has_a_number_and_files_of_its_own_until_it_is_unloaded(tmp_path: Path) -> None:
    adapters, llm = made(tmp_path)
    await adapters.start()
    await adapters.prepare("words", source(tmp_path, "words"))
    (first,) = llm.loaded.values()
    await adapters.prepare("words", source(tmp_path, "words", rank=2))
    (second,) = llm.loaded.values()
    assert first.lora_int_id != second.lora_int_id
    assert (has_files(first), has_files(second)) == (False, True)
    await adapters.close()
    assert not has_files(second)


async def test_a_prepared_adapter_that_is_not_kept_is_dropped(tmp_path: Path) -> None:
    adapters, llm = made(tmp_path)
    await adapters.start()
    await adapters.prepare("words", source(tmp_path, "words"))
    await adapters.refresh(drop=False)
    assert llm.names == ["words"]
    await adapters.refresh()
    assert adapters.requests == {}
    assert llm.names == []
    await adapters.close()


async def test_an_adapter_that_does_not_fit_changes_nothing_and_leaves_no_files(tmp_path: Path) -> None:
    adapters, llm = made(tmp_path, "words")
    await adapters.start()
    llm.refuse = True
    with pytest.raises(AdapterError, match="refused by vLLM: no such module"):
        await adapters.prepare("other", source(tmp_path, "other"))
    assert (sorted(adapters.requests), llm.names) == (["demo:words"], ["demo:words"])
    copy = Path(adapters.requests["demo:words"].lora_path)
    assert os.listdir(copy.parent) == [copy.name]
    await adapters.close()


async def test_without_a_folder_none_can_be_loaded(tmp_path: Path) -> None:
    adapters, _ = made(tmp_path, "words", folder=False)
    await adapters.start()
    with pytest.raises(AdapterError, match="no adapters_folder"):
        await adapters.prepare("more", source(tmp_path, "more"))
    assert "no adapters_folder" in await adapters.keep("more", None)
    await adapters.close()


async def test_a_wrong_adapter_of_the_config_is_a_mistake_of_its_author(tmp_path: Path) -> None:
    adapters, _ = made(tmp_path, "words")
    (tmp_path / "sources" / "words" / "adapter_config.json").unlink()
    with pytest.raises(SettingsError, match=r"demo:words \(.*words\) has no file"):
        await adapters.start()
    await adapters.close()


async def test_one_of_the_folder_that_has_gone_is_left_out(tmp_path: Path) -> None:
    kept(tmp_path).write("gone", AdapterSettings(source="/no/such", id="gone"))
    adapters, _ = made(tmp_path, "words")
    await adapters.start()
    assert list(adapters.requests) == ["demo:words"]
    with pytest.raises(RequestError, match="The model 'gone' does not exist") as caught:
        await adapters.check("gone")
    assert (caught.value.status, caught.value.param) == (404, "model")
    await adapters.close()


async def test_one_of_the_folder_that_can_not_be_used_keeps_no_engine_from_starting(tmp_path: Path) -> None:
    odd = source(tmp_path, "odd")
    (Path(odd.source) / "adapter_config.json").write_text('{"r": 1e999}')
    kept(tmp_path).write("odd", odd)
    adapters, _ = made(tmp_path, "words")
    await adapters.start()
    assert list(adapters.requests) == ["demo:words"]
    with pytest.raises(AdapterError, match="PEFT's format"):
        await adapters.prepare("again", odd)
    await adapters.close()


async def test_one_that_could_not_be_read_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "sources" / "late"
    kept(tmp_path).write("late", AdapterSettings(source=str(path), id="late"))
    now = 0.0
    adapters = Adapters(
        model(tmp_path, "words"),
        FakeLLM(),
        AdapterFiles(tmp_path),
        {},
        CallBook("demo"),
        clock=lambda: now,
    )
    await adapters.start()
    write_adapter(path)
    await adapters.refresh()
    assert "late" not in adapters.requests
    now = 30.0
    await adapters.check("late")
    assert "late" in adapters.requests
    await adapters.close()


async def test_the_user_config_takes_the_place_of_the_config(tmp_path: Path) -> None:
    adapters, llm = made(tmp_path, "words")
    await adapters.start()
    more = source(tmp_path, "more")
    await adapters.declare((more,))
    assert list(adapters.requests) == ["more"]
    await settled(llm, ["more"])
    with pytest.raises(SettingsError, match="has no file"):
        await adapters.declare((more, AdapterSettings(source="/no/such")))
    assert list(adapters.requests) == ["more"]
    await adapters.declare(None)
    assert list(adapters.requests) == ["demo:words"]
    await adapters.close()


async def test_an_adapter_leaves_vllm_after_its_last_request(tmp_path: Path) -> None:
    adapters, llm = made(tmp_path, "words")
    await adapters.start()
    request = adapters.lora_request("demo:words")
    assert adapters.slots.take("demo:words")
    await adapters.declare(())
    assert llm.names == ["demo:words"]
    assert has_files(request)
    with pytest.raises(RequestError, match="does not exist"):
        adapters.lora_request("demo:words")
    adapters.slots.give("demo:words")
    await settled(llm, [])
    assert adapters.slots.resident == []
    await adapters.close()


async def test_another_adapter_gets_an_id_when_the_requests_of_the_one_before_have_ended(
    tmp_path: Path,
) -> None:
    adapters, llm = made(tmp_path)
    await adapters.start()
    kept(tmp_path).write("words", source(tmp_path, "words"))
    await adapters.refresh()
    before = adapters.lora_request("words")
    assert adapters.slots.take("words")
    other = write_adapter(tmp_path / "sources" / "other")
    kept(tmp_path).write("words", AdapterSettings(source=str(other), id="words"))
    refreshing = asyncio.ensure_future(adapters.refresh())
    async with asyncio.timeout(STILL_S):
        while "words" in adapters.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert has_files(before)
        adapters.slots.give("words")
        await refreshing
    assert adapters.lora_request("words").lora_int_id != before.lora_int_id
    assert not has_files(before)
    assert llm.names == ["words"]
    await adapters.close()


async def test_a_failure_while_the_folder_is_followed_is_logged_and_the_next_look_is_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters, llm = made(tmp_path)
    await adapters.start(follow_s=0.001)
    llm.unable = True
    kept(tmp_path).write("first", source(tmp_path, "first"))
    async with asyncio.timeout(STILL_S):
        while "the device is gone" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert adapters.requests == {}
        llm.unable = False
        kept(tmp_path).write("second", source(tmp_path, "second"))
        while "second" not in adapters.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert "first" in adapters.requests
    (record,) = (record for record in caplog.records if record.exc_info)
    assert record.getMessage().startswith("the look at the folder of the adapters failed; it is tried again")
    await adapters.close()


async def test_an_adapter_that_vllm_may_still_have_keeps_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters, llm = made(tmp_path)
    await adapters.start()
    await adapters.prepare("words", source(tmp_path, "words"))
    (request,) = llm.loaded.values()
    llm.keep = True
    with caplog.at_level("ERROR", "ray.serve"):
        await adapters.refresh()
    assert has_files(request)
    (record,) = caplog.records
    assert "words could not be removed from vLLM" in record.getMessage()
    assert record.exc_info
    await adapters.close()
    assert not has_files(request)


async def test_a_load_that_is_cancelled_leaves_no_files(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    begun, go = asyncio.Event(), threading.Event()
    copies: list[Path] = []

    class Slow(AdapterFiles):
        def fetch(self, location: str) -> Adapter:
            adapter = super().fetch(location)
            copies.append(adapter.path)
            loop.call_soon_threadsafe(begun.set)
            assert go.wait(STILL_S)
            return adapter

    llm = FakeLLM()
    adapters = Adapters(model(tmp_path), llm, Slow(tmp_path), {}, CallBook("demo"))
    await adapters.start()
    async with asyncio.timeout(STILL_S):
        loading = asyncio.ensure_future(adapters.prepare("words", source(tmp_path, "words")))
        await begun.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        (copy,) = copies
        assert copy.exists()
        # Its thread goes on.
        go.set()
        while copy.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert llm.names == []
    await adapters.close()


OnDevice = Callable[[Device], Adapters]


@pytest.fixture
def on_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnDevice:
    monkeypatch.setattr(AsyncLLM, "generate", Device.generate)

    def made(llm: Device) -> Adapters:
        settings = model(tmp_path, simulate=None, engine={"max_loras": 1})
        adapters = Adapters(settings, llm, AdapterFiles(tmp_path), {}, CallBook("demo"))
        llm.slots = adapters.slots
        return adapters

    return made


async def test_an_adapter_is_tried_in_a_slot_by_its_own_name(tmp_path: Path, on_device: OnDevice) -> None:
    adapters = on_device(llm := Device(unused=(("a",), ("b",))))
    await adapters.prepare("words", source(tmp_path, "words"))
    assert (llm.tried, llm.held, llm.slots.resident) == (["trial of words"], ["trial of words"], [])
    assert llm.names == ["words"]
    await adapters.close()


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
    adapters = on_device(llm)
    with pytest.raises(AdapterError, match=reason):
        await adapters.prepare("words", source(tmp_path, "words"))
    assert (llm.names, llm.slots.resident, llm.removed.is_set()) == ([], [], True)
    await adapters.close()


async def test_a_load_that_is_cancelled_inside_vllm_is_removed_there(
    tmp_path: Path, on_device: OnDevice
) -> None:
    adapters = on_device(llm := Device())
    assert llm.slots.take("other")
    async with asyncio.timeout(STILL_S):
        loading = asyncio.ensure_future(adapters.prepare("words", source(tmp_path, "words")))
        await llm.checked.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
    assert (llm.names, llm.tried) == ([], [])
    # No request waits for the place any more.
    assert llm.slots.take("other")
    await adapters.close()
