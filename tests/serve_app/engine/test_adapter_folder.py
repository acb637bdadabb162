"""The folder of adapters, as a directory and as object storage."""

from pathlib import Path

import pytest

from serve_app.engine import adapter_folder
from serve_app.engine.adapter_folder import AdapterFolder, FolderError
from serve_app.settings.adapters import AdapterSettings

WORDS = AdapterSettings(source="/adapters/words", id="words")


@pytest.fixture(params=["directory", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "adapters") if request.param == "directory" else f"memory://{tmp_path}"


def test_what_one_process_keeps_another_one_reads(place: str) -> None:
    ours, theirs = AdapterFolder(place, "org/demo"), AdapterFolder(place, "org/demo")
    assert theirs.read() == {}
    ours.write("words", WORDS)
    ours.write("org/demo:a", pinned := AdapterSettings(source="org/a", id="org/demo:a", pinned=True))
    assert theirs.read() == {"words": WORDS, "org/demo:a": pinned}
    theirs.remove("words")
    theirs.remove("words")
    assert ours.read() == {"org/demo:a": pinned}


def test_models_do_not_share_their_adapters(place: str) -> None:
    AdapterFolder(place, "a").write("words", WORDS)
    assert AdapterFolder(place, "b").read() == {}


def test_the_number_of_adapters_is_bounded(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_folder, "MAX_ADAPTERS", 1)
    folder = AdapterFolder(place, "demo")
    folder.write("words", WORDS)
    with pytest.raises(FolderError, match="which are the most"):
        folder.write("more", WORDS)


def test_a_process_that_ends_while_it_writes_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    folder = AdapterFolder(str(tmp_path), "demo")
    folder.write("words", WORDS)
    (tmp_path / "demo" / ".draft").write_text('{"sou')
    assert folder.read() == {"words": WORDS}


def test_a_file_of_something_else_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    folder = AdapterFolder(str(tmp_path), "demo")
    folder.write("words", WORDS)
    (tmp_path / "demo" / "other.json").write_text('{"source": 7}')
    with pytest.raises(FolderError, match=r"adapters_folder: .*no adapter"):
        folder.read()


def test_a_folder_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="can't be written"):
        AdapterFolder(str(tmp_path / "file"), "demo").write("words", WORDS)


def test_a_scheme_without_a_package_is_an_error_with_the_fix() -> None:
    with pytest.raises(FolderError, match="pip install"):
        AdapterFolder("nothing://bucket", "demo")
