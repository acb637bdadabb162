"""Command line of the benchmark of datasets: python -m tests.benchmarks.datasets --help."""

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from serve_app.demo.questions import all_questions, to_jsonl
from tests.benchmarks import command
from tests.benchmarks.command import positive
from tests.benchmarks.measuring import Row, Table, interleave, ratios
from tests.benchmarks.serve.pipes import Pipe
from tests.benchmarks.serve.running import environment
from tests.e2e.service import ROOT, Service

BASE = "LLM.generate"
LISTS, PROCESSOR = "Ray Data, lists", "Ray Data, ServeDeploymentProcessor"
OTHERS = ["driver, HTTP", "driver, handle", LISTS, PROCESSOR]

Way = Callable[[Path], float]
"""Sends a file of rows, and returns the seconds it took."""


Generate = Callable[[Path], tuple[float, list[str]]]
"""Sends a file of rows through vLLM, and returns the seconds it took and the texts."""


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

    def __init__(self, service: Service, offline: Generate, folder: Path) -> None:
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
        return seconds

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
            *("--concurrency", "500"),
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = command.parser(
        "tests.benchmarks.datasets",
        "Measure a dataset through the driver beside LLM.generate in a process and Ray Data stages: the demo "
        "model on the CPU, 10 calls of 50 prompts at once. LLM.generate is always measured.",
        rounds=5,
        only=OTHERS,
        results="driver.json",
    )
    parser.add_argument("--rows", type=positive, default=5000, help="rows in a run, at most 20000")
    options = parser.parse_args(arguments)
    with command.place() as folder:
        file = folder / "rows.jsonl"
        file.write_text(to_jsonl(random.Random(0).sample(all_questions(), options.rows)))
        with running(folder) as service, offline(folder) as generate:
            bench = Bench(service, generate, folder)
            ways = bench.ways(options.only or OTHERS)
            samples = {name: (lambda way=way: options.rows / way(file)) for name, way in ways.items()}
            found = interleave("driver", samples, options.rounds)
    table = tabulate(options.rows, options.rounds, found, bench)
    return command.publish(options, {f"driver, {options.rows} rows": table})


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
    app["runtime_env"] = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    for deployment in app["deployments"]:
        deployment["ray_actor_options"]["num_cpus"] /= 4
    service = Service(config, folder)
    try:
        yield service
    finally:
        service.stop()


@contextmanager
def offline(folder: Path) -> Iterator[Generate]:
    """Run vLLM in a process of its own, with the engine's arguments and its one core."""
    config = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    engine = config["applications"][0]["args"]["models"][0]["engine"]
    for name in ("enable_auto_tool_choice", "tool_call_parser"):
        # Options of the server, which the engine doesn't know.
        engine.pop(name, None)
    engine["model"] = str(ROOT / "serve_app/demo/model")
    env = environment() | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    words = [sys.executable, "-m", "tests.benchmarks.serve.offline", json.dumps(engine)]
    with Pipe(words, env, folder / "offline.log") as pipe:
        pipe.read()

        def generate(file: Path) -> tuple[float, list[str]]:
            prompts = [json.loads(row)["prompt"] for row in file.read_text().splitlines()]
            reply = pipe.ask({"prompts": prompts, "max_tokens": 16})
            return reply["ended"] - reply["started"], reply["texts"]

        yield generate


if __name__ == "__main__":
    sys.exit(main())
