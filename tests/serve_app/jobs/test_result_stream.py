import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.jobs.content import Content, Contents
from serve_app.jobs.errors import ContentLostError
from serve_app.jobs.models import Batch
from serve_app.jobs.routes import result_stream
from tests.progress import STILL_S
from tests.serve_app.jobs.helpers import batch_of, on_disk

LIMIT_S = STILL_S


class Writer:
    """A batch whose output is written."""

    def __init__(self, content: Contents) -> None:
        self.content = content
        self.batch = batch_of("b", "in", state="in_progress")
        self.looked = asyncio.Event()

    def write(self, data: bytes) -> None:
        """Append to the output, and commit it."""
        size = self.batch.output_bytes
        self.content.append(self.batch.output_file, size, data)
        self.batch = replace(self.batch, output_bytes=size + len(data))

    def end(self) -> None:
        """End the batch."""
        self.content.seal(self.batch.output_file, self.batch.output_bytes)
        self.batch = replace(self.batch, state="completed")

    async def look(self) -> Batch:
        """Return the batch as it is now."""
        self.looked.set()
        return self.batch

    def stream(self, start: int = 0) -> AsyncIterator[bytes]:
        """Read the output."""
        return result_stream(self.content, self.batch, self.look, False, start, 0.001)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(on_disk(tmp_path))


async def test_results_come_while_they_are_written(writer: Writer) -> None:
    writer.write(b"one\n")
    # Leftovers of a process that has ended, or bytes that are not committed yet.
    writer.content.append(writer.batch.output_file, 4, b"not committed\n")
    async with asyncio.timeout(LIMIT_S):
        stream = writer.stream()
        assert await anext(stream) == b"one\n"
        writer.write(b"two\n")
        assert await anext(stream) == b"two\n"
        writer.write(b"three\n")
        writer.end()
        assert [piece async for piece in stream] == [b"three\n"]


async def test_a_reader_goes_on_where_it_was(writer: Writer) -> None:
    writer.write(b"one\n")
    writer.write(b"two\n")
    writer.end()
    async with asyncio.timeout(LIMIT_S):
        assert b"".join([piece async for piece in writer.stream(4)]) == b"two\n"
        assert [piece async for piece in writer.stream(8)] == []


async def test_a_batch_without_results_is_an_empty_stream(writer: Writer) -> None:
    async with asyncio.timeout(LIMIT_S):
        reading = asyncio.create_task(anext(writer.stream(), b""))
        await writer.looked.wait()
        writer.end()
        assert await reading == b""


async def test_a_file_that_is_gone_ends_the_stream(writer: Writer) -> None:
    writer.write(b"one\n")
    writer.content.remove(writer.batch.output_file)
    with pytest.raises(ContentLostError):
        await anext(writer.stream())


async def test_parts_that_become_one_object_meanwhile_are_read_there(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed here (pip install -e '.[storage]')")
    from serve_app.jobs.object_storage import Objects

    writer = Writer(Content(tmp_path, 1, Objects("memory://stream")))
    for data in (b"one\n", b"two\n", b"three\n"):
        writer.write(data)
    async with asyncio.timeout(LIMIT_S):
        stream = writer.stream()
        assert await anext(stream) == b"one\n"
        writer.end()
        assert b"".join([piece async for piece in stream]) == b"two\nthree\n"
