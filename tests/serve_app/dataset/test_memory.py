"""The memory of a run doesn't grow with the input."""

import json
import sys
from pathlib import Path

import pytest

from tests import progress

MOST_MIB = 12.0
"""MiB by which a run may grow from two windows of rows to all: buffers of the allocator, latencies."""

SCRIPT = """
import asyncio, json, sys
from pathlib import Path
from serve_app.dataset import Prompter
from serve_app.dataset.output import Output
from serve_app.dataset.readers import open_source
from serve_app.dataset.run import Drive
from serve_app.rows.rows import RowAnswer

class Echo:
    async def send(self, request):
        await asyncio.sleep(0)
        detail = {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1}
        prompts = request.body["prompts"]
        return RowAnswer(200, {"results": prompts, "details": [detail] * len(prompts)})
    async def load(self, base):
        return None
    async def replicas(self):
        return []
    async def close(self):
        pass

async def main(source, out):
    source = open_source(source)
    output = Output(Path(out), {}, source.fingerprint())
    rows = output.numbered(source.files())
    pace = {"concurrency": 500, "window": (5_000, 1 << 20)}
    drive = Drive(rows, Prompter(), Echo(), {}, output.record, done=output.done, **pace)
    await drive.run()
    output.complete()
    output.close()
    return drive.stats.rows

done = asyncio.run(main(*sys.argv[1:]))
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
print(json.dumps([done, int(peak.split()[1]) / 1024]))
"""


LONG = [pytest.param(15_000, count, 200, marks=pytest.mark.long) for count in (60_000, 1_000_000)]


def peak_mib(folder: Path, count: int, length: int, kind: str) -> float:
    """Return the peak memory of a run over `count` prompts of `length` characters, in MiB."""
    source = folder / f"{count}.jsonl"
    with source.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"id": f"r{number}", "prompt": f"{number} " + "x" * length}) + "\n")
    out = folder / f"{count}.out.{kind}"
    done = progress.run([sys.executable, "-c", SCRIPT, source, out], check=True)
    rows, mib = json.loads(done.stdout)
    assert rows == count
    return float(mib)


@pytest.mark.parametrize(("few", "many", "length"), [(1_500, 6_000, 4_000), *LONG])
def test_memory_is_flat(tmp_path: Path, few: int, many: int, length: int) -> None:
    least, most = (peak_mib(tmp_path, count, length, "jsonl") for count in (few, many))
    print(f"{least:.1f} MiB with {few:,} rows, {most:.1f} MiB with {many:,}")
    assert most - least < MOST_MIB


@pytest.mark.parametrize(("few", "many", "length"), LONG)
def test_memory_of_a_parquet_output_is_flat(tmp_path: Path, few: int, many: int, length: int) -> None:
    least, most = (peak_mib(tmp_path, count, length, "parquet") for count in (few, many))
    print(f"{least:.1f} MiB with {few:,} rows, {most:.1f} MiB with {many:,}")
    assert most - least < 3 * MOST_MIB
