"""Real processes that are killed, with their threads and SQLite's own writes."""

import asyncio
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from pydantic_core import from_json

from tests.progress import STILL_S
from tests.serve_app.jobs.helpers import batch_of, ids_on_disk, known_contents, opened, put, row, text_of

LIMIT = 16
ROWS = 600


async def run(folder: Path, calls: Path, kill_at: int) -> int:
    """Return how a process ended."""
    module = "tests.serve_app.jobs.process"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, str(folder), str(calls), str(LIMIT), str(kill_at)
    )
    async with asyncio.timeout(STILL_S):
        return await process.wait()


@pytest.mark.parametrize(
    "kills", [(4, 33), pytest.param(tuple(range(2, 62, 3)), marks=pytest.mark.long)], ids=["few", "many"]
)
async def test_a_killed_process_goes_on(kills: tuple[int, ...], tmp_path: Path) -> None:
    folder, calls = tmp_path / "batches", tmp_path / "calls"
    store, content = opened(folder)
    wanted = {}
    for id, tenant in (("b0", "anna"), ("b1", "ben")):
        wanted[id] = [f"{id}-{number}" for number in range(ROWS)]
        put(store, content, f"in-{id}", text_of(*map(row, wanted[id])), tenant)
        store.add_batch(batch_of(id, f"in-{id}", tenant), 9)
    store.close()

    ends = [await run(folder, calls, kill_at) for kill_at in [*kills, 0]]
    killed = ends.count(-signal.SIGKILL)
    assert killed >= 2
    assert ends[-1] == 0

    store, content = opened(folder)
    for id, custom_ids in wanted.items():
        batch = store.batch(id)
        assert (batch.state, batch.completed, batch.failed) == ("completed", ROWS, 0)
        output = b"".join(content.pieces(batch.output_file, batch.output_bytes)).splitlines()
        assert sorted(from_json(line)["custom_id"] for line in output) == sorted(custom_ids)
    assert ids_on_disk(content) == known_contents(store)
    store.close()
    tries = Counter(calls.read_text().split())
    assert set(tries) == {custom_id for custom_ids in wanted.values() for custom_id in custom_ids}
    assert tries.total() - len(tries) <= killed * LIMIT
