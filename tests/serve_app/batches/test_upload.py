import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.batches.content import Content
from serve_app.batches.upload import receive

BOUNDARY = "b0undary"
HEAD = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="ü.jsonl"\r\n\r\n'
).encode()
TAIL = f"\r\n--{BOUNDARY}--\r\n".encode()
KIND = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def site(folder: Path) -> httpx.AsyncClient:
    """Return a client of an application that keeps the file of a form as `kept`."""
    content = Content(folder)

    async def keep(request: Request) -> Response:
        upload = await receive(request, content, 100 << 20)
        assert upload.draft is not None
        content.keep(upload.draft, "kept")
        return JSONResponse({"filename": upload.filename, **upload.fields})

    app = Starlette(routes=[Route("/", keep, methods=["POST"])])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://upload")


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
