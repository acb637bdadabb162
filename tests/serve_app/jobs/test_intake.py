"""How rows come in: uploads and validation."""

import asyncio
import threading
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.api.protocol import JSON
from serve_app.jobs.content import Content, DiskContent
from serve_app.jobs.intake import check, read_rows
from serve_app.jobs.routes import BatchAPI
from serve_app.jobs.store import Store
from tests.progress import until
from tests.serve_app.jobs.helpers import CHAT, limits_of, on_disk, row, text_of
from tests.serve_app.jobs.site import http_of

BOUNDARY = "b0undary"
HEAD = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="ü.jsonl"\r\n\r\n'
).encode()
TAIL = f"\r\n--{BOUNDARY}--\r\n".encode()
KIND = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


@asynccontextmanager
async def site(folder: Path, content: Content[Path] | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the routes."""
    store = Store(folder)
    content = content or on_disk(folder, store.epoch)
    async with http_of(BatchAPI(store, content, lambda: None, limits=lambda key: limits_of()).app()) as http:
        yield http
    store.close()


async def post(http: httpx.AsyncClient, content: Any) -> httpx.Response:
    """Send a form."""
    return await http.post("/v1/files", content=content, headers=KIND)


def kept(folder: Path, answer: httpx.Response) -> Path:
    """Return the content of a file that was sent."""
    return folder / "files" / str(answer.json()["id"])


async def test_a_form_may_come_in_any_pieces(tmp_path: Path) -> None:
    data = f"\r\n--{BOUNDARY[:-1]}\r\n--\r\n".encode()
    body = HEAD + data + TAIL

    async def pieces(size: int) -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async with site(tmp_path) as http:
        for size in (1, 7, 1000):
            answer = await post(http, pieces(size))
            assert (answer.json()["filename"], answer.json()["purpose"]) == ("ü.jsonl", "batch")
            # A last line without an end gets one.
            assert kept(tmp_path, answer).read_bytes().removesuffix(b"\n") == data.removesuffix(b"\n")


@pytest.mark.parametrize(
    ("given", "filename"),
    [
        ("; filename*=UTF-8''%C3%BC.jsonl", "ü.jsonl"),
        ("; filename=\"in.jsonl\"; filename*=utf-8''%C3%BC.jsonl", "in.jsonl"),
        ('; filename=""', "file"),
        ("", "file"),
        # PostgreSQL stores no NUL.
        ('; filename="a\0b.jsonl"', "a\ufffdb.jsonl"),
    ],
)
async def test_the_file_may_have_any_name_or_none(tmp_path: Path, given: str, filename: str) -> None:
    head = HEAD.replace('; filename="ü.jsonl"'.encode(), given.encode())
    async with site(tmp_path) as http:
        answer = await post(http, head + b"{}\n" + TAIL)
        assert (answer.json()["filename"], answer.json()["purpose"]) == (filename, "batch")
        assert kept(tmp_path, answer).read_bytes() == b"{}\n"


async def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    piece = b"x" * 65_535 + b"\n"

    async def pieces() -> AsyncIterator[bytes]:
        yield HEAD
        for _ in range(500):
            yield piece
        yield TAIL

    async with site(tmp_path) as http:
        tracemalloc.start()
        answer = await post(http, pieces())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert answer.status_code == 200
    assert kept(tmp_path, answer).stat().st_size == 500 * len(piece)
    assert peak < 3 << 20


@pytest.mark.parametrize(
    ("head", "more"),
    [
        (b"\r\n", b"\n" * 10_000),
        (HEAD + TAIL.rstrip(b"-\r\n") + b"\r\n", f"\r\n--{BOUNDARY}\r\n".encode() * 300),
        (HEAD + TAIL, b"an epilogue" * 1000),
    ],
    ids=["before the first part", "parts without headers", "behind the last part"],
)
async def test_bytes_that_are_not_the_file_are_bounded(tmp_path: Path, head: bytes, more: bytes) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield head
        for _ in range(150_000 // len(more)):
            yield more

    async with site(tmp_path) as http:
        assert (await post(http, pieces())).status_code == 413
    assert [*(tmp_path / "drafts").iterdir()] == []


async def test_a_draft_made_after_the_end_of_its_request_is_deleted(tmp_path: Path) -> None:
    loop, opening, made, go = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event(), threading.Event()

    class SlowContent(Content[Path]):
        def draft(self) -> Any:
            loop.call_soon_threadsafe(opening.set)
            go.wait()
            draft = super().draft()
            assert draft.path.exists()
            loop.call_soon_threadsafe(made.set)
            return draft

    async with site(tmp_path, SlowContent(tmp_path, 1, DiskContent(tmp_path))) as http:
        posting = asyncio.create_task(post(http, HEAD + TAIL))
        await opening.wait()
        posting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await posting
        go.set()
        await made.wait()
        await until(lambda: not [*(tmp_path / "drafts").iterdir()])


MODELS = ("demo", "other")


def errors_of(*rows: JSON | bytes, endpoint: str = CHAT, **limits: Any) -> list[JSON]:
    """Return the errors of a batch over a file with these rows."""
    plan = read_rows(BytesIO(text_of(*rows)), limits_of(**limits))
    models = MODELS[:1] if endpoint == "/generate" else MODELS
    return check(plan, endpoint, models, limits_of(**limits).max_lines)


def body(**fields: Any) -> JSON:
    return {"body": {"model": "demo"} | fields}


def test_a_valid_file() -> None:
    for second, model in ({}, "demo"), (body(model="other"), None):
        rows = row("a"), b"", row("b", **second)
        assert errors_of(*rows) == []
        plan = read_rows(BytesIO(text_of(*rows)), limits_of())
        assert (len(plan), plan.model) == (2, model)


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{not json", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'{"a": NaN}', "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (row("x", custom_id=None), "missing_required_parameter", "custom_id"),
        (row("x", custom_id=7), "invalid_type", "custom_id"),
        (row("x", custom_id=""), "invalid_type", "custom_id"),
        (row("a"), "duplicate_custom_id", "custom_id"),
        (row("x", method="GET"), "invalid_method", "method"),
        (row("x", method=None), "missing_required_parameter", "method"),
        (row("x", url="/v1/embeddings"), "mismatched_url", "url"),
        (row("x", body=None), "missing_required_parameter", "body"),
        (row("x", body="text"), "invalid_type", "body"),
        (row("x", body={"messages": []}), "missing_required_parameter", "body.model"),
        (row("x", **body(model=3)), "invalid_type", "body.model"),
        (row("x", **body(model="gpt-9")), "model_not_found", "body.model"),
        (row("x", **body(stream=True)), "invalid_value", "body.stream"),
        (row("x" * 3000), "line_too_long", None),
    ],
)
def test_a_bad_line_is_told_with_its_number(bad: JSON | bytes, code: str, param: str | None) -> None:
    errors = errors_of(row("a"), b"", bad, row("b"), max_line_bytes=2000)
    assert [(error["code"], error["line"], error["param"]) for error in errors] == [(code, 3, param)]
    assert errors[0]["message"]


def test_errors_of_file_and_batch_are_in_order() -> None:
    long = row("c", **body(model="x" * 600))
    errors = errors_of(row("a", url="/v1/rerank"), b"{", long, row("d", custom_id=4))
    assert [error["line"] for error in errors] == [1, 2, 3, 4]
    assert f"The model '{'x' * 512}...' is not served" in errors[2]["message"]


def test_a_model_may_be_left_out_where_one_is_served() -> None:
    one = row("a", url="/generate", body={"prompts": ["x"]})
    assert errors_of(one, endpoint="/generate") == []
    plan = read_rows(BytesIO(text_of(one)), limits_of())
    assert plan.model is None
    assert [error["param"] for error in check(plan, "/generate", MODELS, 1)] == ["body.model"]


def test_an_empty_file_is_an_error() -> None:
    assert [error["code"] for error in errors_of(b"", b" ")] == ["empty_file"]


def test_a_file_of_blank_lines_is_not_read_to_its_end() -> None:
    file = BytesIO(b"\n" * 10_000_000)
    plan = read_rows(file, limits_of())
    assert {error["code"] for error in plan.errors} == {"invalid_json_line"}
    assert file.tell() < 1_000_000


def test_too_many_rows_are_an_error() -> None:
    rows = [row(str(number)) for number in range(4)]
    assert errors_of(*rows, max_lines=4) == []
    # The limit of the key that uploads the file, and of the key that creates the batch.
    whole = read_rows(BytesIO(text_of(*rows)), limits_of())
    for errors in (errors_of(*rows, max_lines=3), check(whole, CHAT, MODELS, 3)):
        assert [(error["code"], error["line"]) for error in errors] == [("too_many_rows", 4)]


def test_the_number_of_errors_is_bounded() -> None:
    for rows in ([b"{"] * 150, [row(str(number), url="/v1/rerank") for number in range(150)]):
        assert [error["line"] for error in errors_of(*rows)] == list(range(1, 101))
    errors = errors_of(*([b"{}"] * 150))
    assert [error["line"] for error in errors] == [1 + at // 4 for at in range(100)]


def test_memory_does_not_grow_with_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "in"
    filler = "x" * 10_000
    with path.open("wb") as file:
        for number in range(2_000):
            file.write(text_of(row(f"{number}-{filler[:400]}", **body(text=filler))))
    assert path.stat().st_size > 20_000_000
    tracemalloc.start()
    with path.open("rb") as file:
        plan = read_rows(file, limits_of())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(plan), plan.errors) == (2_000, ())
    assert peak < 5_000_000
