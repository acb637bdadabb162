"""The adapters of an engine that a test plays."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.errors import RequestError
from serve_app.engine.adapter_copies import AdapterFiles
from serve_app.engine.adapter_files import AdapterError
from serve_app.engine.adapter_folder import AdapterFolder
from serve_app.engine.vllm.adapters import Adapters
from serve_app.ledger.calls import CallBook
from serve_app.settings.adapters import AdapterSettings
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError
from tests.progress import STILL_S
from tests.serve_app.engine.adapters import write_adapter
from tests.serve_app.engine.lora_doubles import FakeLLM, has_files, source


def made(tmp_path: Path, *names: str, folder: bool = True, **more: Any) -> tuple[Adapters, FakeLLM]:
    """Return the adapters of a model, whose config has those of these names."""
    settings = LLMSettings.model_validate(
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
    llm = FakeLLM()
    return Adapters(settings, llm, AdapterFiles(), {}, CallBook("demo")), llm


async def test_the_adapters_of_the_config_and_of_the_folder_are_served_from_the_start(tmp_path: Path) -> None:
    AdapterFolder(str(tmp_path / "kept"), "demo").write("more", source(tmp_path, "more"))
    adapters, llm = made(tmp_path, "words")
    await adapters.start()
    assert sorted(adapters.requests) == ["demo:words", "more"]
    assert llm.names == ["demo:words", "more"]
    shown = {one["id"]: (one["root"], one["declared"]) for one in adapters.report()}
    assert shown == {"demo:words": ("words", True), "more": ("more", False)}
    await adapters.close()


async def test_a_prepared_adapter_is_served_once_it_is_kept(tmp_path: Path) -> None:
    adapters, llm = made(tmp_path)
    await adapters.start()
    await adapters.prepare("words", wanted := source(tmp_path, "words"))
    assert "words" not in adapters
    assert llm.names == ["words"]
    assert await adapters.keep("words", wanted) == ""
    await adapters.refresh()
    assert "words" in adapters
    with pytest.raises(AdapterError, match="loaded already"):
        await adapters.prepare("words", wanted)
    assert await adapters.keep("words", None) == ""
    await adapters.refresh()
    assert "words" not in adapters
    await settled(llm, [])
    await adapters.close()


async def settled(llm: FakeLLM, names: list[str]) -> None:
    async with asyncio.timeout(STILL_S):
        await llm.removed.wait()
    assert llm.names == names


async def test_a_prepared_adapter_that_is_not_kept_is_dropped(tmp_path: Path) -> None:
    adapters, llm = made(tmp_path)
    await adapters.start()
    await adapters.prepare("words", source(tmp_path, "words"))
    await adapters.refresh(drop=False)
    assert llm.names == ["words"]
    await adapters.refresh()
    assert "words" not in adapters
    assert llm.names == []
    await adapters.close()


async def test_one_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    adapters, llm = made(tmp_path, "words")
    await adapters.start()
    with pytest.raises(AdapterError, match="rank 9"):
        await adapters.prepare("large", source(tmp_path, "large", rank=9))
    llm.refuse = True
    with pytest.raises(AdapterError, match="refused by vLLM: no such module"):
        await adapters.prepare("other", source(tmp_path, "other"))
    assert (sorted(adapters.requests), llm.names) == (["demo:words"], ["demo:words"])
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
    gone = AdapterSettings(source="/no/such", id="gone")
    AdapterFolder(str(tmp_path / "kept"), "demo").write("gone", gone)
    adapters, _ = made(tmp_path, "words")
    await adapters.start()
    assert list(adapters.requests) == ["demo:words"]
    with pytest.raises(RequestError, match="served here: demo, demo:words"):
        await adapters.check("gone")
    await adapters.close()


async def test_one_of_the_folder_that_can_not_be_used_keeps_no_engine_from_starting(tmp_path: Path) -> None:
    odd = source(tmp_path, "odd")
    (Path(odd.source) / "adapter_config.json").write_text('{"r": 1e999}')
    AdapterFolder(str(tmp_path / "kept"), "demo").write("odd", odd)
    adapters, _ = made(tmp_path, "words")
    await adapters.start()
    assert list(adapters.requests) == ["demo:words"]
    with pytest.raises(AdapterError, match="PEFT's format"):
        await adapters.prepare("again", odd)
    await adapters.close()


async def test_one_that_could_not_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sources" / "late"
    AdapterFolder(str(tmp_path / "kept"), "demo").write("late", AdapterSettings(source=str(path), id="late"))
    adapters, _ = made(tmp_path, "words")
    await adapters.start()
    write_adapter(path)
    await adapters.refresh()
    assert "late" not in adapters
    monkeypatch.setattr("serve_app.engine.vllm.adapters.RETRY_S", 0.0)
    await adapters.check("late")
    assert "late" in adapters
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
    request = adapters.requests["demo:words"]
    async with adapters.using(request):
        await adapters.declare(())
        assert "demo:words" not in adapters
        assert llm.names == ["demo:words"]
        assert has_files(request)
        with pytest.raises(RequestError, match="does not exist"):
            async with adapters.using(request):
                pass
    await settled(llm, [])
    await adapters.close()


async def test_a_pinned_adapter_is_pinned_in_vllm(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "words"))
    adapters, llm = made(tmp_path, adapters=[{"source": path, "pinned": True}])
    await adapters.start()
    assert llm.pinned == list(llm.loaded)
    assert adapters.report()[0]["resident"]
    await adapters.close()


async def test_a_failure_while_the_folder_is_followed_is_logged_and_the_next_look_is_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters, llm = made(tmp_path)
    await adapters.start(follow_s=0.001)
    folder = AdapterFolder(str(tmp_path / "kept"), "demo")
    llm.unable = True
    folder.write("first", source(tmp_path, "first").model_copy(update={"pinned": True}))
    async with asyncio.timeout(20):
        while "the device is gone" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        llm.unable = False
        folder.write("second", source(tmp_path, "second"))
        while "second" not in adapters:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    (record,) = (record for record in caplog.records if record.exc_info)
    assert record.getMessage().startswith("the look at the folder of the adapters failed; it is tried again")
    await adapters.close()
