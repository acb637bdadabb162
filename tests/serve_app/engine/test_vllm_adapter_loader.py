"""Adapters that go into an engine and out of it."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine.adapter_copies import AdapterFiles
from serve_app.engine.adapter_files import Adapter, AdapterError
from serve_app.engine.vllm_adapter_loader import AdapterLoader
from serve_app.settings.adapters import AdapterSettings
from tests.progress import STILL_S
from tests.serve_app.engine.lora_doubles import FakeLLM, has_files, source

LIMIT_S = STILL_S


def made() -> tuple[AdapterLoader, FakeLLM]:
    llm = FakeLLM()
    return AdapterLoader(llm, AdapterFiles(), {}, simulated=True), llm


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
    loader = AdapterLoader(llm, files, {"words": fetched}, simulated=True)
    assert (await loader.load("words", settings)).request.lora_path == str(fetched.path)
    assert (await loader.load("words", settings)).request.lora_path != str(fetched.path)
    await loader.close()


@pytest.mark.parametrize(("rank", "reason"), [(9, "rank 9"), (4, "refused by vLLM: no such module")])
async def test_an_adapter_that_does_not_fit_leaves_no_files(tmp_path: Path, rank: int, reason: str) -> None:
    llm, files = FakeLLM(), AdapterFiles()
    settings = source(tmp_path, "words", rank=rank)
    fetched = files.fetch(settings)
    loader = AdapterLoader(llm, files, {"words": fetched}, simulated=True)
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
