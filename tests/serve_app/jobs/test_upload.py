import asyncio
import threading
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message

from serve_app.api.errors import RequestError
from serve_app.jobs.content import Content, Disk, Draft
from serve_app.jobs.intake import FORM_BYTES, receive
from tests.serve_app.jobs.helpers import on_disk

BOUNDARY = "b0undary"
HEAD = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="ü.jsonl"\r\n\r\n'
).encode()
TAIL = f"\r\n--{BOUNDARY}--\r\n".encode()
KIND = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def site(folder: Path) -> httpx.AsyncClient:
    """Return a client of an application that keeps the file of a form as `kept`."""
    content = on_disk(folder)

    async def keep(request: Request) -> Response:
        upload = await receive(request, content, 100 << 20)
        assert upload.draft is not None
        content.keep(upload.draft, "kept")
        return JSONResponse({"filename": upload.filename, **upload.fields})

    app = Starlette(routes=[Route("/", keep, methods=["POST"])])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://upload")


def request_of(*pieces: bytes) -> Request:
    """Return the request of a form."""
    left = [*pieces]

    async def receive() -> Message:
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    headers = [(name.encode(), value.encode()) for name, value in KIND.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


async def test_a_form_may_come_in_any_pieces(tmp_path: Path) -> None:
    data = f"\r\n--{BOUNDARY[:-1]}\r\n--\r\n".encode()
    body = HEAD + data + TAIL

    async def pieces(size: int) -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async with site(tmp_path) as http:
        for size in (1, 7, 1000):
            answer = await http.post("/", content=pieces(size), headers=KIND)
            assert answer.json() == {"filename": "ü.jsonl", "purpose": "batch"}
            assert (tmp_path / "files" / "kept").read_bytes() == data


@pytest.mark.parametrize(
    ("given", "filename"),
    [
        ("; filename*=UTF-8''%C3%BC.jsonl", "ü.jsonl"),
        ("; filename=\"in.jsonl\"; filename*=utf-8''%C3%BC.jsonl", "in.jsonl"),
        ('; filename=""', "file"),
        ("", "file"),
    ],
)
async def test_the_file_may_have_any_name_or_none(tmp_path: Path, given: str, filename: str) -> None:
    head = HEAD.replace('; filename="ü.jsonl"'.encode(), given.encode())
    async with site(tmp_path) as http:
        answer = await http.post("/", content=head + b"{}" + TAIL, headers=KIND)
    assert answer.json() == {"filename": filename, "purpose": "batch"}
    assert (tmp_path / "files" / "kept").read_bytes() == b"{}"


async def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    piece = b"0123456789abcdef" * 4096

    async def pieces() -> AsyncIterator[bytes]:
        yield HEAD
        for _ in range(500):
            yield piece
        yield TAIL

    async with site(tmp_path) as http:
        tracemalloc.start()
        answer = await http.post("/", content=pieces(), headers=KIND)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert answer.status_code == 200
    assert (tmp_path / "files" / "kept").stat().st_size == 500 * len(piece)
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
    pieces = [head, *[more] * (2 * FORM_BYTES // len(more))]
    with pytest.raises(RequestError) as caught:
        await receive(request_of(*pieces), on_disk(tmp_path), 100 << 20)
    assert caught.value.status == 413
    assert [*(tmp_path / "drafts").iterdir()] == []


async def test_a_draft_that_a_thread_makes_after_the_end_of_its_request_is_deleted(tmp_path: Path) -> None:
    loop, opening, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    class SlowContent(Content[Path]):
        def draft(self) -> Draft:
            loop.call_soon_threadsafe(opening.set)
            go.wait()
            return super().draft()

    receiving = asyncio.create_task(
        receive(request_of(HEAD, TAIL), SlowContent(tmp_path, 1, Disk(tmp_path)), 100)
    )
    await opening.wait()
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    go.set()
    await loop.shutdown_default_executor()
    assert [*(tmp_path / "drafts").iterdir()] == []


async def test_a_name_has_no_nul_which_postgresql_does_not_store(tmp_path: Path) -> None:
    head = HEAD.replace("ü".encode(), b"a\0b")
    upload = await receive(request_of(head, TAIL), on_disk(tmp_path), 100)
    upload.discard()
    assert upload.filename == "a\ufffdb.jsonl"
