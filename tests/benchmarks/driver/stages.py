"""A file through an Engine as a Ray Data stage: a list in each call, or a call for each row."""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa
import ray
from ray import serve

from serve_app.driver.ray_data import Generate

ROW: dict[str, Any] = {"fn_constructor_args": ["llm", "demo"], "batch_format": "pyarrow", "batch_size": 50}
POOL: dict[str, Any] = {"concurrency": 1, "max_concurrency": 10, "num_cpus": 0}


class PerRow:
    """One handle call for each row, all of a batch at once: what Ray's own `ServeDeploymentProcessor` does.

    That one calls a streaming method with fields of its own, so it can't call ours as it is.
    """

    def __init__(self, app: str, model: str) -> None:
        self._engine: Any = serve.get_deployment_handle(f"Engine:{model}", app_name=app)

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        """Yield the batch with its results."""
        bodies = [{"prompts": [prompt], "service_tier": "flex"} for prompt in batch["prompt"].to_pylist()]
        answers = await asyncio.gather(*(self._engine.generate.remote(body) for body in bodies))
        results = [answer["results"][0] for answer in answers]
        yield batch.append_column("result", pa.array(results, pa.string()))


def main() -> None:
    """Run a stage over a file, and print the seconds that it took and its results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("stage", choices=["lists", "rows"])
    options = parser.parse_args()
    ray.init(address="auto", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items([json.loads(line) for line in open(options.file)])  # noqa: SIM115
    stage: Any = Generate if options.stage == "lists" else PerRow
    started = time.monotonic()
    done = rows.map_batches(stage, **ROW, **POOL).take_all()
    seconds = time.monotonic() - started
    print(json.dumps([seconds, {row["id"]: row["result"] for row in done}]))


if __name__ == "__main__":
    main()
