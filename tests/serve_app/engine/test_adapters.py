"""Adapters from each kind of source, their fit, and the folder that keeps them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.numpy import load_file

from serve_app.engine.adapters import (
    AdapterError,
    AdapterFiles,
    AdapterFolder,
    FolderError,
)
from serve_app.settings.adapters import AdapterSettings
from tests.serve_app.engine.adapters import write_adapter
from tests.serve_app.models.hub_server import running_hub, without_account


@pytest.fixture
def files(tmp_path: Path) -> AdapterFiles:
    return AdapterFiles(tmp_path)


def is_whole(adapter: Any) -> bool:
    """Return whether both files of an adapter can be read."""
    return len(load_file(adapter.path / "adapter_model.safetensors")) == 2 and adapter.rank == 4


def test_a_copy_outlives_its_source(files: AdapterFiles, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "source")
    adapter = files.fetch(str(source))
    for file in source.iterdir():
        file.unlink()
    assert is_whole(adapter)


def test_copies_go_with_their_process(tmp_path: Path) -> None:
    (left := tmp_path / "saturate-adapters-99999999-x").mkdir()
    files, others = AdapterFiles(tmp_path), AdapterFiles(tmp_path)
    assert not left.exists()
    source = str(write_adapter(tmp_path / "source"))
    first, second, third = files.fetch(source).path, files.fetch(source).path, others.fetch(source).path
    assert len({first, second, third}) == 3
    files.close()
    assert (first.exists(), second.exists(), third.exists()) == (False, False, True)
    others.close()
    assert list(tmp_path.iterdir()) == [tmp_path / "source"]


def test_a_source_that_fails_leaves_no_copy(files: AdapterFiles, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "source", rank=0)
    with pytest.raises(AdapterError):
        files.fetch(str(source))
    assert not list(tmp_path.glob("saturate-adapters-*/*"))


def test_a_path_is_a_path_whatever_its_characters(files: AdapterFiles, tmp_path: Path) -> None:
    assert is_whole(files.fetch(str(write_adapter(tmp_path / "a::memory"))))


def test_a_url_is_read_through_fsspec(files: AdapterFiles, tmp_path: Path) -> None:
    import fsspec

    source = write_adapter(tmp_path / "source")
    memory = fsspec.filesystem("memory")
    memory.put(f"{source}/", f"{tmp_path}/bucket/words/", recursive=True)
    adapter = files.fetch(f"memory://{tmp_path}/bucket/words")
    assert is_whole(adapter)
    with pytest.raises(AdapterError, match=r"has no file adapter_config\.json"):
        files.fetch(f"memory://{tmp_path}/bucket/none")


def test_an_adapter_of_the_hub_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, files: AdapterFiles, tmp_path: Path
) -> None:
    source = write_adapter(tmp_path / "source")
    with running_hub(source) as url:
        without_account(monkeypatch, tmp_path, url)
        assert is_whole(files.fetch("org/folder"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    # It is in the client's cache now.
    assert is_whole(files.fetch("org/folder"))


@pytest.mark.parametrize(
    ("id", "reason"),
    [
        ("org/none", r"can't be read: the Hugging Face hub has no model org/none, .*HF_TOKEN"),
        ("org/gated", r"can't be read: org/gated is gated: accept its terms"),
        ("org/folder", r"can't be read: org/folder has no adapter_model\.safetensors, so it is no adapter"),
        ("org/forbidden", r"can't be read: org/forbidden: the Hugging Face hub answers 403"),
        ("org/--bad", r"can't be read: 'org/--bad' is not a Hugging Face id"),
    ],
)
def test_an_adapter_that_the_hub_does_not_give_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, files: AdapterFiles, tmp_path: Path, id: str, reason: str
) -> None:
    source = write_adapter(tmp_path / "source")
    (source / "adapter_model.safetensors").unlink()
    with running_hub(source) as url:
        without_account(monkeypatch, tmp_path, url)
        with pytest.raises(AdapterError, match=reason) as caught:
            files.fetch(id)
    assert "\n" not in str(caught.value)


def test_a_file_of_the_hub_that_is_too_large_is_not_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = write_adapter(tmp_path / "source")
    most = (source / "adapter_model.safetensors").stat().st_size - 1
    files = AdapterFiles(tmp_path, max_bytes=most)
    with running_hub(source) as url:
        without_account(monkeypatch, tmp_path, url)
        with pytest.raises(AdapterError, match=f"and {most} are the most"):
            files.fetch("org/folder")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_source_that_is_missing_or_something_else_is_an_error(files: AdapterFiles, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"has no file adapter_config\.json"):
        files.fetch(str(tmp_path / "missing"))
    source = write_adapter(tmp_path / "source")
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match="PEFT's format"):
        files.fetch(str(source))
    with pytest.raises(AdapterError, match="can't be read"):
        files.fetch("nothing://bucket/words")


@pytest.mark.parametrize("config", ['{"r": 1e999}', "[" * 100_000], ids=["endless rank", "nested"])
def test_a_config_of_odd_values_is_an_error(files: AdapterFiles, tmp_path: Path, config: str) -> None:
    source = write_adapter(tmp_path / "source")
    (source / "adapter_config.json").write_text(config)
    with pytest.raises(AdapterError, match="PEFT's format"):
        files.fetch(str(source))


def test_a_copy_that_can_not_be_written_is_an_error(files: AdapterFiles, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "source")
    files.close()
    with pytest.raises(AdapterError, match="FileNotFoundError"):
        files.fetch(str(source))


@pytest.mark.parametrize(
    "fields",
    ['"r": 0', '"r": 2.5', '"r": 1e999', '"r": true', '"rank_pattern": {"q_proj": "8"}', '"r": null'],
)
def test_a_rank_that_is_none_is_an_error(files: AdapterFiles, tmp_path: Path, fields: str) -> None:
    source = write_adapter(tmp_path / "source")
    (source / "adapter_config.json").write_text(f'{{"r": 4, {fields}}}')
    with pytest.raises(AdapterError, match=r"PEFT's format: a rank .* is a positive integer, not"):
        files.fetch(str(source))


def test_a_config_that_is_too_large_is_not_read(files: AdapterFiles, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "source")
    (source / "adapter_config.json").write_text(" " * ((4 << 20) + 1))
    with pytest.raises(AdapterError, match=r"adapter_config\.json has 4194305 bytes, and 4194304 are"):
        files.fetch(str(source))


@contextmanager
def web_server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Run a web server whose answers a function gives; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # It may leave in the middle of the answer.
            with suppress(ConnectionError):
                answer(self)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_web_server_that_tells_no_size_can_not_fill_the_disk(files: AdapterFiles, tmp_path: Path) -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        if handler.command == "GET":
            while True:
                handler.wfile.write(b" " * 1_000_000)

    with web_server(endless) as url, pytest.raises(AdapterError, match=r"_config\.json has .* are the most"):
        files.fetch(f"{url}/words")


WORDS = AdapterSettings(source="/adapters/words", id="words")


@pytest.fixture(params=["directory", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    place = str(tmp_path / "adapters")
    return place if request.param == "directory" else f"{request.param}://{place}"


def test_what_one_process_keeps_another_one_reads(place: str) -> None:
    ours, theirs = AdapterFolder(place, "org/demo"), AdapterFolder(place, "org/demo")
    assert theirs.read() == {}
    theirs.remove("words")
    ours.write("words", WORDS)
    ours.write("org/demo:a", other := AdapterSettings(source="org/a", id="org/demo:a"))
    assert theirs.read() == {"words": WORDS, "org/demo:a": other}
    ours.write("words", longer := AdapterSettings(source="/adapters/longer", id="words"))
    assert theirs.read() == {"words": longer, "org/demo:a": other}
    theirs.remove("words")
    theirs.remove("words")
    assert ours.read() == {"org/demo:a": other}


def test_a_change_is_seen_whatever_its_size_and_time(place: str) -> None:
    ours, theirs = AdapterFolder(place, "demo"), AdapterFolder(place, "demo")
    for name in "abcabc":
        ours.write("words", adapter := AdapterSettings(source=f"org/{name}", id="words"))
        assert theirs.read() == {"words": adapter}


def test_only_files_that_have_changed_are_read_again() -> None:
    from fsspec import register_implementation
    from fsspec.implementations.memory import MemoryFileSystem

    read: list[str] = []

    class Watched(MemoryFileSystem):  # type: ignore[misc]
        protocol = "watched"

        def cat_file(self, path: str, **options: Any) -> Any:
            read.append(path.rpartition("/")[2])
            return super().cat_file(path, **options)

    register_implementation("watched", Watched, clobber=True)
    ours, theirs = (AdapterFolder("watched://bucket", "demo") for _ in range(2))
    for name in ("words", "more"):
        theirs.write(name, WORDS)
    assert set(ours.read()) == {"words", "more"}
    assert read == ["more.json", "words.json"]
    theirs.write("more", AdapterSettings(source="org/a", id="more"))
    assert ours.read()["more"].source == "org/a"
    assert set(ours.read()) == {"words", "more"}
    assert read == ["more.json", "words.json", "more.json"]
    theirs.remove("more")
    assert set(ours.read()) == {"words"}
    assert len(read) == 3


def test_a_link_is_read_each_time(tmp_path: Path) -> None:
    # A mounted ConfigMap changes what its links lead to.
    folder = AdapterFolder(str(tmp_path / "kept"), "demo")
    folder.write("words", WORDS)
    path = tmp_path / "kept" / "demo" / "words.json"
    path.rename(behind := tmp_path / "words.json")
    path.symlink_to(behind)
    assert folder.read() == {"words": WORDS}
    behind.write_text('{"source": "org/a", "id": "words"}')
    assert folder.read()["words"].source == "org/a"


def test_models_do_not_share_their_adapters(place: str) -> None:
    AdapterFolder(place, "a").write("words", WORDS)
    assert AdapterFolder(place, "b").read() == {}


def test_the_number_of_adapters_is_bounded(place: str) -> None:
    folder = AdapterFolder(place, "demo", max_adapters=1)
    folder.write("words", WORDS)
    with pytest.raises(FolderError, match="has 1 adapters, which are the most"):
        folder.write("more", WORDS)
    folder.write("words", WORDS)


def test_a_process_that_ends_while_it_writes_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    folder = AdapterFolder(str(tmp_path), "demo")
    folder.write("words", WORDS)
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["words.json"]
    (tmp_path / "demo" / ".draft").write_text('{"sou')
    assert folder.read() == {"words": WORDS}


def test_a_file_of_something_else_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    folder = AdapterFolder(str(tmp_path), "demo")
    folder.write("words", WORDS)
    (tmp_path / "demo" / "other.json").write_text('{"source": 7}')
    for _ in range(2):
        with pytest.raises(FolderError, match=r"adapters_folder: .*not an adapter"):
            folder.read()


def test_a_folder_that_can_not_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="can't be written"):
        AdapterFolder(str(tmp_path / "file"), "demo").write("words", WORDS)
    with pytest.raises(FolderError, match="can't be read"):
        AdapterFolder(str(tmp_path / "file"), "demo").read()


def test_a_scheme_without_a_package_is_an_error_with_the_fix() -> None:
    with pytest.raises(FolderError, match="pip install"):
        AdapterFolder("nothing://bucket", "demo")
