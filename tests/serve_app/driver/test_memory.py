"""The memory of a run doesn't grow with the input."""

import json
import sys
from pathlib import Path

import pytest

from tests import progress

MOST_MIB = 12.0
"""MiB by which a run may grow from a thousand rows to all: buffers of the allocator, latencies."""

SCRIPT = """
import asyncio, json, resource, sys
from pathlib import Path
from serve_app.driver.chunks import chunked
from serve_app.driver.manifest import Manifest
from serve_app.driver.output import Output
from serve_app.dataset.prompts import Prompter
from serve_app.dataset.formats import numbered
from serve_app.dataset.readers import open_source
from serve_app.driver.running import Run

class Echo:
    async def generate(self, body):
        await asyncio.sleep(0)
        detail = {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1}
        prompts = body["prompts"]
        return {"results": prompts, "details": [detail] * len(prompts), "errors": []}
    async def replicas(self):
        return []
    async def close(self):
        pass

async def main(source, out):
    output = Output(Path(out), Manifest({}, {}))
    run = Run(Echo(), {})
    rows = numbered(open_source(source).values())
    async for done in run.results(chunked(rows, Prompter(), 50, done=output.done)):
        output.append(done)
    output.complete()
    return run.stats.totals.rows

done = asyncio.run(main(*sys.argv[1:]))
print(json.dumps([done, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


every_form = pytest.mark.parametrize("count", [60_000, pytest.param(1_000_000, marks=pytest.mark.long)])


def peak_mib(folder: Path, count: int, kind: str) -> float:
    """Return the peak memory of a run over `count` rows, in MiB."""
    source = folder / f"{count}.jsonl"
    with source.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"id": f"r{number}", "prompt": f"{number} " + "x" * 200}) + "\n")
    out = folder / f"{count}.out.{kind}"
    done = progress.run([sys.executable, "-c", SCRIPT, source, out], check=True)
    rows, mib = json.loads(done.stdout)
    assert rows == count
    return float(mib)


@every_form
def test_memory_is_flat(tmp_path: Path, count: int) -> None:
    few, many = peak_mib(tmp_path, 1000, "jsonl"), peak_mib(tmp_path, count, "jsonl")
    print(f"{few:.1f} MiB with 1,000 rows, {many:.1f} MiB with {count:,}")
    assert many - few < MOST_MIB


@every_form
def test_memory_of_a_parquet_output_is_flat(tmp_path: Path, count: int) -> None:
    # From a few row groups on.
    few, many = peak_mib(tmp_path, 10_000, "parquet"), peak_mib(tmp_path, count, "parquet")
    print(f"{few:.1f} MiB with 10,000 rows, {many:.1f} MiB with {count:,}")
    assert many - few < 3 * MOST_MIB
