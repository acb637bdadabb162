"""Bodies in pieces: they arrive in order, hold their sender back, and end with their request."""

import asyncio

from serve_app.jobs.upload import Uploads
from tests.progress import STILL_S

LIMIT_S = STILL_S


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_pieces_arrive_in_order_and_hold_the_sender_back() -> None:
    uploads = Uploads()
    body = await uploads.open("a")
    sent = 0

    async def send() -> None:
        nonlocal sent
        for number in range(10):
            assert await uploads.put("a", b"%d" % number, number == 9)
            sent += 1

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        group.create_task(send())
        await settle()
        assert sent == 2, "two pieces wait for their reader"
        read = []
        while not body.ended:
            message = await body.receive()
            read.append(message["body"])
            assert message["more_body"] is not body.ended
            await settle()
            assert sent <= len(read) + 2
    assert read == [b"%d" % number for number in range(10)]


async def test_a_piece_waits_for_its_request() -> None:
    uploads = Uploads()
    putting = asyncio.ensure_future(uploads.put("a", b"x", True))
    await settle()
    assert not putting.done()
    body = await uploads.open("a")
    async with asyncio.timeout(LIMIT_S):
        assert await putting
        assert (await body.receive())["body"] == b"x"


async def test_a_piece_without_a_request_is_refused() -> None:
    assert not await Uploads(begin_s=0.0).put("a", b"x", True)


async def test_the_end_of_the_request_lets_its_sender_go() -> None:
    uploads = Uploads()
    await uploads.open("a")
    for _ in range(2):
        assert await uploads.put("a", b"x", False)
    waiting = asyncio.ensure_future(uploads.put("a", b"x", False))
    await settle()
    await uploads.close("a")
    async with asyncio.timeout(LIMIT_S):
        assert not await waiting
    await uploads.close("a")
