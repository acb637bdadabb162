"""A process that runs the open batches of a folder, and kills itself at a failpoint.

python -m tests.serve_app.jobs.process FOLDER CALLS LIMIT KILL_AT
"""

import asyncio
import os
import signal
import sys
from itertools import count
from pathlib import Path

from serve_app.jobs import failpoints
from serve_app.jobs.batches import BatchRunner
from serve_app.jobs.key_rules import KeyRules
from serve_app.jobs.storage import delete_noted
from serve_app.rows.pacing import Fixed
from serve_app.rows.rows import RowAnswer, RowRequest
from tests.serve_app.jobs.engine import Served, custom_id_of
from tests.serve_app.jobs.helpers import NOW, limits_of, opened


class LoggedEngine(Served):
    """Answers at once, and notes each call in a file that is there after a kill."""

    def __init__(self, calls: Path) -> None:
        self._handle = os.open(calls, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def send(self, request: RowRequest) -> RowAnswer:
        """Answer a row."""
        custom_id = custom_id_of(request.body)
        os.write(self._handle, f"{custom_id}\n".encode())
        await asyncio.sleep(0)
        return RowAnswer(200, {"echo": custom_id})


async def main(folder: Path, calls: Path, limit: int, kill_at: int) -> None:
    """Run until all batches have ended, or the failpoint is reached; 0: never."""
    store, content = opened(folder)
    delete_noted(store, content)
    engine = LoggedEngine(calls)
    runner = BatchRunner(
        store,
        content,
        engine,
        KeyRules({"demo"}, limits_of()),
        concurrency=lambda: Fixed(limit),
        clock=lambda: NOW,
        tick_s=0.05,
    )
    reached = count(1)
    committed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def reach(point: str) -> None:
        if next(reached) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loop.call_soon_threadsafe(committed.set)

    failpoints.hook = reach
    async with asyncio.TaskGroup() as group:
        group.create_task(runner.run())
        while await asyncio.to_thread(store.open_batches):
            await committed.wait()
            committed.clear()
        runner.stop()


if __name__ == "__main__":
    folder, calls, limit, kill_at = sys.argv[1:]
    asyncio.run(main(Path(folder), Path(calls), int(limit), int(kill_at)))
