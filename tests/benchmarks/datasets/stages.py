"""Ray Data stages that send a file to an Engine: ours, and Ray's own."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import ray
from ray.data import Dataset
from ray.data.llm import ServeDeploymentProcessorConfig, build_processor

from serve_app.dataset.ray_data import Generate
from serve_app.ingress.status import engine_name

BATCH = 50
CALLS = 10


def ours(rows: Dataset) -> Dataset:
    """Return the results of rows, with a list in each call."""
    return rows.map_batches(
        Generate,
        fn_constructor_args=["llm", "demo"],
        batch_format="pyarrow",
        batch_size=BATCH,
        concurrency=1,
        max_concurrency=CALLS,
        num_cpus=0,
    )


def processor(rows: Dataset) -> Dataset:
    """Return the results of rows, with a call per row: as many at once as ours has prompts in its calls."""
    config = ServeDeploymentProcessorConfig(
        deployment_name=engine_name("demo"), app_name="llm", batch_size=BATCH * CALLS, concurrency=1
    )
    process = build_processor(
        config,
        preprocess=_to_request,
        postprocess=_to_result,
        preprocess_map_kwargs={"num_cpus": 0},
        postprocess_map_kwargs={"num_cpus": 0},
    )
    return process(rows)


def _to_request(row: dict[str, Any]) -> dict[str, Any]:
    kwargs = {"prompts": [row["prompt"]], "service_tier": "flex"}
    return {"id": row["id"], "method": "answer", "request_kwargs": kwargs}


def _to_result(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "result": row["results"][0]}


STAGES = {"lists": ours, "processor": processor}


def main() -> None:
    """Run a stage over a file; write the seconds it took, and its results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("stage", choices=STAGES)
    options = parser.parse_args()
    ray.init(address="auto", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items([json.loads(line) for line in options.file.read_text().splitlines()])
    stage = STAGES[options.stage]
    started = time.monotonic()
    done = stage(rows).take_all()
    seconds = time.monotonic() - started
    # To a file, since Ray writes to standard output.
    options.out.write_text(json.dumps([seconds, {row["id"]: row["result"] for row in done}]))


if __name__ == "__main__":
    main()
