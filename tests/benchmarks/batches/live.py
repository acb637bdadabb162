"""Command line of the benchmark of live batches: python -m tests.benchmarks.batches.live --help."""

import argparse
import asyncio
import dataclasses
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import httpx
import openai

from batcher.stats import percentiles
from serve_app.api.protocol import JSON
from tests.benchmarks import command
from tests.benchmarks.beside.traffic import LIVE_IN, LIVE_OUT, Seen, Traffic, send
from tests.benchmarks.command import above_0, positive
from tests.benchmarks.measuring import Row, Table, interleave, progress, ratios
from tests.benchmarks.serve.loads import INPUT, Prompt, text
from tests.benchmarks.serve.models import MODELS, about
from tests.benchmarks.serve.running import Server
from tests.benchmarks.serve.servers import OFFLINE, offline, saturate
from tests.benchmarks.serve.ways import at_once, completion

COMPLETIONS: Literal["/v1/completions"] = "/v1/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}
POLL_S = 0.05
ALONE_S = 30.0
"""Seconds over which the throughput of a batch alone is counted."""
LIMIT_S = 900.0
MANY = 50_000
"""Rows of a batch that doesn't end while it is measured."""

FIRST_ROW = 10_000_000
"""Number of the first row of a batch; no live request has it."""

RATE = 2.0
"""Live requests per second."""

EPILOG = """\
rate: a batch, and runs of `saturate batch` over HTTP with such rows, in turns on one service without other
traffic, and `LLM.generate` in a process of its own. The time of the batch is from its upload to `completed`.

beside: live streams alone, then beside a batch that does not end, then the batch alone, in each round, since
a machine that others use changes within minutes. A p99 takes some hundreds of requests: --seconds times
--rate.

examples:
  make bench NAME=batches.live
  make bench NAME=batches.live ARGS="--only beside --model l4-7b --seconds 60"
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

    def tokens(self) -> int:
        """Return the output tokens of the engine so far, of all that it runs."""
        return sum(int(each["output_tokens"]) for each in self._batchers())

    def _batchers(self) -> list[JSON]:
        models = self._http.get("/stats").json()["models"]
        return [each["batcher"] for each in models["demo"]["replicas"]]

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
    folder: Path, first: int, count: int, tokens: int, *, length: int = INPUT, mixed: bool = False
) -> tuple[Path, Path]:
    """Write the same rows as a dataset and for the batch API; return both files.

    Args:
        folder: Where they are written.
        first: Number of the first prompt.
        count: Number of rows.
        tokens: Tokens of each answer.
        length: Tokens of each prompt.
        mixed: From half of the tokens to one and a half. Equal answers end in waves, of which a window of
            time has one more or less.
    """
    prompts, requests = folder / "prompts.jsonl", folder / "requests.jsonl"
    with prompts.open("w") as one, requests.open("w") as other:
        for number in range(first, first + count):
            share = random.Random(number).uniform(0.5, 1.5) if mixed else 1
            prompt = Prompt(text(number, length), round(share * tokens))
            request = completion(prompt)
            one.write(json.dumps({"id": str(number), "prompt": prompt.text}) + "\n")
            line: JSON = {"custom_id": str(number), "method": "POST", "url": COMPLETIONS}
            other.write(json.dumps(line | {"body": request.body}) + "\n")
    return prompts, requests


def rate(options: argparse.Namespace, folder: Path) -> Table:
    """Compare the rows per second of a batch, of the command, and of vLLM without a service."""
    numbers = iter(range(0, 1_000_000_000, options.rows))
    model = MODELS[options.model](folder)
    with saturate(model, folder, batches=folder / "batches") as server, offline(model, folder) as alone:
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

        def dataset() -> float:
            prompts, _ = write_rows(folder, next(numbers), options.rows, options.answer)
            out = folder / "out.jsonl"
            command = [sys.executable, "-m", "serve_app.cli", "batch", str(prompts), str(out), "--overwrite"]
            command += ["--quiet", "--url", f"http://127.0.0.1:{server.port}"]
            command += ["--max-tokens", str(options.answer)]
            command += ["--min-tokens", str(options.answer)]
            subprocess.run(command, check=True, timeout=LIMIT_S)
            told = json.loads((folder / "out.jsonl.report.json").read_text())["this_run"]
            return float(options.rows / told["elapsed_s"])

        def generate() -> float:
            first = next(numbers)
            rows = range(first, first + options.rows)
            prompts = [Prompt(text(number, INPUT), options.answer) for number in rows]
            (answer,) = at_once(alone, prompts).answers
            return float(options.rows / (answer.ended_at - answer.sent_at))

        ways = {OFFLINE: generate, "batch": batch, "saturate batch": dataset}
        found = interleave("rate", ways, options.rounds)
    return Table(
        f"{about(options.model)}, {options.rows} rows of 64 tokens in and {options.answer} out, no others; "
        "the batch from its upload to `completed`, the command from its first call to its last result.",
        [
            *(Row(way, "rows/s", rates) for way, rates in found.items()),
            Row("batch / LLM.generate", "x", ratios(found["batch"], found[OFFLINE]), at_least=0.97),
            Row(
                "saturate batch / LLM.generate",
                "x",
                ratios(found["saturate batch"], found[OFFLINE]),
                at_least=0.95,
            ),
        ],
    )


def beside(options: argparse.Namespace, folder: Path) -> Table:
    """Measure live traffic and a batch, each alone and both together."""
    # Rows that came before would be in the prefix cache.
    numbers = itertools.count(FIRST_ROW, MANY)
    traffic = Traffic(options.rate, None, options.seconds)
    settled = dataclasses.replace(traffic, warm_up_s=options.settle)
    alone, both, own, free = [], [], [], []
    with saturate(MODELS[options.model](folder), folder, batches=folder / "batches") as server:
        api = API(server)
        for number in range(1, options.rounds + 1):
            progress(f"beside: round {number} of {options.rounds}, live traffic alone")
            alone.append(ttft_p99_ms(asyncio.run(send(server.port, traffic, seed=10 * number))))
            progress(f"beside: round {number} of {options.rounds}, both")
            id = api.create(write_rows(folder, next(numbers), MANY, options.answer, mixed=True)[1])
            seen = asyncio.run(beside_batch(server, settled, api, 10 * number + 1))
            both.append(ttft_p99_ms(seen))
            own.append(seen.tokens / seen.seconds)
            progress(f"beside: round {number} of {options.rounds}, the batch alone")
            free.append(api.rate(ALONE_S))
            api.cancel(id)
    return Table(
        f"{about(options.model)}; live: {options.rate:g} streams/s, {LIVE_IN} tokens in and {LIVE_OUT} out; "
        f"batch: rows of 64 in and {options.answer} out, half of that more or less.",
        [
            Row("live alone: TTFT p99", "ms", alone),
            Row("live beside the batch: TTFT p99", "ms", both),
            Row("TTFT p99, beside / alone", "x", ratios(both, alone), at_most=1.4),
            Row("batch alone", "tokens/s", free),
            Row("batch beside live traffic", "tokens/s", own),
            Row("batch, beside / alone", "x", ratios(own, free), at_least=0.8),
        ],
    )


def ttft_p99_ms(seen: Seen) -> float:
    """Return the p99 of the time to the first token of live requests, in milliseconds."""
    return percentiles([answer.ttft_s * 1e3 for answer in seen.live], (0.99,))[0]


async def beside_batch(
    server: Server, traffic: Traffic, api: API, seed: int, headers: Sequence[str] = ()
) -> Seen:
    """Send live traffic beside a batch that runs, see `send`; return the answers, and tokens of the batch."""
    live = asyncio.create_task(send(server.port, traffic, seed, headers))
    await asyncio.sleep(traffic.warm_up_s)
    made = await asyncio.to_thread(api.rate, traffic.seconds)
    seen = await live
    # The engine counts the tokens of the live answers too.
    seen.tokens = round(made * traffic.seconds) - len(seen.live) * LIVE_OUT
    return seen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parts = {"rate": rate, "beside": beside}
    parser = command.parser(
        "tests.benchmarks.batches.live",
        "Measure the batch API of a real service: its rate, and live traffic beside it.",
        EPILOG,
        rounds=5,
        only=parts,
        results="batches-live.json",
    )
    parser.add_argument("--model", choices=MODELS, default="l4-7b", help="model or simulated device")
    parser.add_argument("--rows", type=positive, default=2_000, help="rows in a run of `rate`")
    parser.add_argument("--answer", type=positive, default=64, help="tokens of an answer of a row")
    parser.add_argument("--rate", type=above_0, default=RATE, help="live requests per second")
    parser.add_argument(
        "--seconds", type=above_0, default=150.0, help="seconds of live traffic that count, per run"
    )
    parser.add_argument(
        "--settle", type=above_0, default=60.0, help="seconds that both run before they count"
    )
    options = parser.parse_args(arguments)
    missed = 0
    for name in options.only or parts:
        with command.place() as folder:
            table = parts[name](options, folder)
        title = f"{name}, {options.model}, rows of {options.answer} tokens"
        if name == "beside" and options.rate != RATE:
            title += f", {options.rate:g} live requests per second"
        missed += command.publish(options, {title: table})
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
