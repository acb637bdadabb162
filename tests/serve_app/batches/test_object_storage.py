"""Contents in an object storage, which is in memory."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from pydantic_core import from_json

from serve_app.batches.errors import ContentLostError, StoreError
from serve_app.batches.limits import Limits
from serve_app.batches.service import BatchService
from serve_app.batches.validate import validate
from serve_app.settings.batches import BatchesSettings
from tests.serve_app.batches.engine import Engine
from tests.serve_app.batches.helpers import CHAT, batch_of, commits, put, row, text_of
from tests.serve_app.batches.test_service import get

pytest.importorskip("fsspec", reason="fsspec is not installed here (pip install -e '.[storage]')")

from serve_app.batches import object_storage
from serve_app.batches.object_storage import BLOCK_BYTES, ObjectContent
from tests.progress import STILL_S
from tests.serve_app.batches.buffered_storage import PROTOCOL, BufferedStorage

LIMIT_S = STILL_S


@pytest.fixture(params=["memory", PROTOCOL])
def url(request: pytest.FixtureRequest) -> str:
    return f"{request.param}://{uuid4().hex}"


@pytest.fixture
def content(url: str, tmp_path: Path) -> ObjectContent:
    return ObjectContent(url, tmp_path)


def names(content: ObjectContent) -> set[str]:
    """Return the ids of all contents, of those in parts too."""
    root = content._files.removesuffix("files")
    return {path.removeprefix(root).split("/")[1] for path in content._fs.find(root)}


def whole(content: ObjectContent, id: str, size: int) -> bytes:
    return b"".join(content.pieces(id, size))


def test_an_upload_becomes_one_object(content: ObjectContent, tmp_path: Path) -> None:
    draft = content.draft()
    draft.write(b"one\n")
    draft.write(b"two\n")
    assert names(content) == set()
    content.keep(draft, "a")
    assert names(content) == {"a"}
    assert (content.size("a"), content.size("b")) == (8, None)
    assert whole(content, "a", 8) == b"one\ntwo\n"
    with content.path("a").open("rb") as file:
        file.seek(4)
        assert file.readline() == b"two\n"
    assert list((tmp_path / "drafts").iterdir()) == []
    content.remove("a")
    content.remove("a")
    assert names(content) == set()
    with pytest.raises(ContentLostError):
        whole(content, "a", 8)


def test_results_are_parts_until_they_are_sealed(content: ObjectContent) -> None:
    content.append("a", 0, b"one\n")
    content.append("a", 4, b"two\n")
    # This one was never committed, nor was the next.
    content.append("a", 8, b"lost\n")
    content.append("a", 8, b"three\n")
    assert names(content) == {"a"}
    assert whole(content, "a", 14) == b"one\ntwo\nthree\n"
    assert b"".join(content.pieces("a", 14, 2)) == b"e\ntwo\nthree\n"
    assert b"".join(content.pieces("a", 10, 4)) == b"two\nth"
    content.append("a", 14, b"not committed\n")
    for _ in range(2):
        content.seal("a", 14)
        assert content.size("a") == 14
        assert whole(content, "a", 14) == b"one\ntwo\nthree\n"
        assert b"".join(content.pieces("a", 14, 5)) == b"wo\nthree\n"
    content.remove("a")
    assert names(content) == set()


def test_an_earlier_offset_cuts_off_what_was_behind(content: ObjectContent) -> None:
    content.append("a", 0, b"one\n")
    content.append("a", 4, b"two\n")
    content.append("a", 0, b"x\n")
    content.seal("a", 2)
    assert whole(content, "a", 2) == b"x\n"


def test_an_offset_within_a_part_cuts_it(content: ObjectContent) -> None:
    content.append("a", 0, b"one\ntwo\n")
    content.append("a", 8, b"three\n")
    content.append("a", 4, b"2\n")
    content.append("a", 6, b"3\n")
    assert whole(content, "a", 8) == b"one\n2\n3\n"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are merged when they are four, or have 40 bytes."""
    monkeypatch.setattr(object_storage, "MOST_SMALL_PARTS", 4)
    monkeypatch.setattr(object_storage, "PART_BYTES", 40)


@pytest.mark.usefixtures("small_parts")
def test_a_long_content_has_few_parts_and_is_seldom_listed(
    content: ObjectContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, ls = [], content._fs.ls

    def count(path: str, **options: Any) -> Any:
        listed.append(path)
        return ls(path, **options)

    monkeypatch.setattr(content._fs, "ls", count)
    for number in range(200):
        content.append("a", 2 * number, b"x\n")
    assert len(listed) == 1
    assert len(ls(f"{content._parts}/a")) <= 400 // 40 + 4
    assert whole(content, "a", 400) == b"x\n" * 200
    monkeypatch.undo()
    content.seal("a", 400)
    assert whole(content, "a", 400) == b"x\n" * 200


class FailsError(Exception):
    """An error of the storage."""


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("seed", range(100))
def test_results_are_whole_whatever_fails(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends that fail anywhere and are tried again, processes that end, and readers meanwhile."""
    random = Random(seed)
    url = f"memory://{uuid4().hex}"
    content = ObjectContent(url, tmp_path)
    left = -1

    def fail() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise FailsError

    def failing(name: str) -> None:
        call = getattr(content._fs, name)

        def counted(*args: Any, **options: Any) -> Any:
            # An error doesn't say whether the storage has done it.
            fail()
            found = call(*args, **options)
            fail()
            return found

        monkeypatch.setattr(content._fs, name, counted)

    for name in ("pipe_file", "rm", "ls", "cat_ranges", "put_file"):
        failing(name)
    committed = b""
    reader, seen = content.pieces("a", 0), b""
    while len(committed) < 400:
        data = bytes(random.choices(b"abc\n", k=random.randint(1, 12)))
        left = random.randint(1, 16)
        try:
            content.append("a", len(committed), data)
        except OSError:
            if random.random() < 0.3:
                # The process ends, and its readers with it.
                content = ObjectContent(url, tmp_path)
                reader, seen = content.pieces("a", len(committed)), b""
        else:
            if random.random() < 0.8:
                committed += data
        left = -1
        if random.random() < 0.2:
            reader = content.pieces("a", len(committed), start := random.randint(0, len(committed)))
            seen = committed[:start]
        for piece in islice(reader, random.randint(0, 2)):
            seen += piece
            assert committed.startswith(seen)
        assert whole(content, "a", len(committed)) == committed
    left = random.randint(1, 16)
    with suppress(OSError):
        content.seal("a", len(committed))
    left = -1
    content.seal("a", len(committed))
    assert whole(content, "a", len(committed)) == committed
    assert names(content) == {"a"}
    assert content._fs.find(content._parts) == []
    assert list((tmp_path / "drafts").iterdir()) == []


def test_parts_that_are_missing_are_told(content: ObjectContent) -> None:
    with pytest.raises(ContentLostError, match="shorter"):
        content.append("a", 4, b"x")
    content.append("a", 0, b"one\n")
    with pytest.raises(ContentLostError):
        content.seal("a", 5)
    content.seal("a", 0)
    assert names(content) == set()


def test_an_input_is_read_line_by_line_in_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = ObjectContent(f"{PROTOCOL}://{uuid4().hex}", tmp_path)
    draft = content.draft()
    for number in range(600):
        draft.write(text_of(row(str(number), filler="x" * 4000)))
    content.keep(draft, "in")
    fetched: list[int] = []
    monkeypatch.setattr(BufferedStorage, "fetched", fetched)
    assert validate(content.path("in"), CHAT, {"demo"}, Limits())[:3] == (600, "demo", [])
    assert max(fetched) <= BLOCK_BYTES
    assert sum(fetched) < 3 * draft.size


@pytest.mark.parametrize(
    "read",
    [
        lambda content: content.path("a").open("rb").readline(),
        lambda content: [*content.pieces("a", 4)],
        lambda content: [*content.pieces("b", 4)],
    ],
)
def test_a_storage_that_fails_in_the_middle_is_an_error_of_the_system(
    read: Callable[[ObjectContent], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = ObjectContent(f"{PROTOCOL}://{uuid4().hex}", tmp_path)
    for id in ("a", "b"):
        content.append(id, 0, b"one\n")
    content.seal("a", 4)
    monkeypatch.setattr(BufferedStorage, "fails", True)
    with pytest.raises(OSError, match="can't be reached"):
        read(content)


def test_a_storage_that_is_not_known_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        ObjectContent("nowhere://x", tmp_path)


async def test_a_batch_runs_with_its_contents_there(url: str, content: ObjectContent, tmp_path: Path) -> None:
    settings = BatchesSettings(folder=str(tmp_path), content=url)
    engine = Engine(lambda id: 400 if id == "bad" else 200)
    with commits() as committed:
        async with asyncio.timeout(LIMIT_S):
            service = await BatchService.open(settings, engine, {"demo"})
            put(service._store, content, "in", text_of(row("a"), row("bad"), row("c")), "default")
            batch = batch_of("batch_1", "in", "default", expires_at=10**11)
            service._store.add_batch(batch, 1)
            while (answer := from_json(await get(service, "/v1/batches/batch_1")))["status"] != "completed":
                await committed.wait()
                committed.clear()
            output = await get(service, f"/v1/files/{answer['output_file_id']}/content")
            errors = await get(service, f"/v1/files/{answer['error_file_id']}/content")
            await service.close(5.0)
    assert {from_json(line)["custom_id"] for line in output.splitlines()} == {"a", "c"}
    assert [from_json(line)["custom_id"] for line in errors.splitlines()] == ["bad"]
    assert engine.tries == {"a": 1, "bad": 1, "c": 1}
