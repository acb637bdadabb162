"""Rows that share prefixes, in two orders: python -m tests.benchmarks.batches.order --help.

The runner sends the rows of a batch to vLLM's real scheduler on a simulated device, in virtual time: no HTTP,
no service. The orders are those of the input, which is random, and of the batch's plan. The same rows are
sent as a dataset too, as `saturate batch` does.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_core import to_json

from serve_app.api.protocol import JSON
from serve_app.dataset.formats import numbered
from serve_app.dataset.prompts import Prompter
from serve_app.dataset.run import Drive
from serve_app.ingress.replica_choice import ReplicaCharge, ReplicaChoice, ReplicaState
from serve_app.jobs.batches import BatchRunner
from serve_app.jobs.content import Content, Contents, DiskContent
from serve_app.jobs.intake import check, read_rows
from serve_app.jobs.key_rules import KeyRules
from serve_app.jobs.models import Batch, File
from serve_app.jobs.plan import RowPlan
from serve_app.jobs.storage import add_file
from serve_app.jobs.store import Store
from serve_app.rows.pacing import EngineLoad, Fixed
from serve_app.rows.rows import Result, RowAnswer, RowRequest
from serve_app.settings.ingress import IngressSettings
from serve_app.simulation.profiles import PROFILES
from serve_app.stats import ReplicaStats
from tests.benchmarks import command
from tests.benchmarks.command import positive
from tests.benchmarks.measuring import Row, Table, progress
from tests.serve_app.inspected import inspect
from tests.serve_app.jobs.helpers import limits_of

if TYPE_CHECKING:
    from tests.serve_app.simulation.virtual_engine import VirtualEngine

DEVICE = "h100-7b"
CHAT, GENERATE = "/v1/chat/completions", "/generate"
OWN_TOKENS = 64
"""Tokens of a prompt behind its prefix."""

LENGTHS, OUTPUTS = (1000, 3500), (16, 48)
"""Bounds of the tokens of a prefix and of an answer."""

LEAST, LEAST_APART = 2.4, 0.99
"""Targets of the rows per second in the order of the plan, in those of the order of the input: with shared
prefixes and without."""


@dataclass(frozen=True, slots=True)
class Load:
    """A batch.

    Attributes:
        rows: Its rows.
        prefixes: Prefixes that they share, drawn at random; 0: each has one of its own.
        template: Tokens in front of all prefixes.
        in_flight: Rows in flight on each replica.
        seed: Seed of all that is random.
        kv_tokens: Tokens in the KV cache of each replica.
    """

    rows: int = 2500
    prefixes: int = 200
    template: int = 0
    in_flight: int = 100
    seed: int = 5
    kv_tokens: int = PROFILES[DEVICE].kv_tokens

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of the input."""
        for number, body in enumerate(self.bodies()):
            row = {"custom_id": str(number), "method": "POST", "url": CHAT, "body": body}
            yield to_json(row) + b"\n"

    def bodies(self) -> Iterator[JSON]:
        """Yield the calls. A token is a number of three digits and a space."""
        draw = random.Random(self.seed)
        template = _words(draw, self.template)
        shared = [_words(draw, draw.randint(*LENGTHS)) for _ in range(self.prefixes)]
        for _ in range(self.rows):
            prefix = draw.choice(shared) if shared else _words(draw, draw.randint(*LENGTHS))
            messages = [
                {"role": "system", "content": template + prefix},
                {"role": "user", "content": _words(draw, OWN_TOKENS)},
            ]
            yield {"model": "demo", "messages": messages, "max_tokens": draw.randint(*OUTPUTS)}


def _words(draw: random.Random, tokens: int) -> str:
    return "".join(f"{draw.randrange(3, 60):3d} " for _ in range(tokens))


class VirtualEngines:
    """Replicas in virtual time, as a runner's client, each with a clock of its own.

    The replica whose clock is the earliest goes on, once as many rows are in flight as there may be.

    Args:
        engines: The replicas.
        load: The batch that they run.

    Attributes:
        now: The time of what was seen last.
        cached: Tokens of all prompts that were in a prefix cache.
    """

    def __init__(self, engines: "Sequence[VirtualEngine]", load: Load) -> None:
        self.now = 0.0
        self.cached = 0
        self._count = 0
        self._in_flight = load.in_flight * len(engines)
        self._left = load.rows
        self._engines = {f"replica-{number}": engine for number, engine in enumerate(engines)}
        self._choice = ReplicaChoice(draw=random.Random(0))
        self._choice.update({name: ReplicaState(capacity=load.kv_tokens) for name in self._engines})
        self._answers: dict[str, asyncio.Future[None]] = {}
        self._sent = asyncio.Event()
        self._limits = IngressSettings()
        # The calls of a dataset share one bound on the answer.
        self._outputs = {row["messages"][-1]["content"]: row["max_tokens"] for row in load.bodies()}

    async def send(self, request: RowRequest) -> RowAnswer:
        """Answer a row, on the replica that the Ingress would choose."""
        name = str(self._count)
        self._count += 1
        body, endpoint = request.body, request.endpoint
        facts = inspect(request.text, endpoint, self._limits)
        replica = self._choice.choose(facts.prefix)
        charge = ReplicaCharge()
        self._choice.send(charge, replica, facts.prefix, facts.tokens)
        engine = self._engines[replica]
        if not engine.busy:
            engine.time.now = max(engine.time.now, self.now)
        messages = body["messages"][0] if endpoint == GENERATE else body["messages"]
        prompt = [int(word) for message in messages for word in message["content"].split()]
        engine.add(name, prompt, body.get("max_tokens") or self._outputs[messages[-1]["content"]], priority=1)
        self._answers[name] = asyncio.get_running_loop().create_future()
        self._sent.set()
        await self._answers[name]
        charge.release()
        self.cached += engine.cached[name]
        detail = {"finish_reason": "length", "prompt_tokens": len(prompt), "completion_tokens": 1}
        return RowAnswer(200, {"results": [""], "details": [detail]} if endpoint == GENERATE else {})

    async def refresh(self, wake: bool = False) -> Collection[str]:
        """Do nothing: the models stay the same."""
        return ()

    def base_of(self, model: str) -> str | None:
        """Return the only model."""
        return model

    async def load(self, base: str | None) -> EngineLoad | None:
        """Return nothing: the limit on rows is fixed."""
        return None

    async def replicas(self) -> list[ReplicaStats] | None:
        """Return nothing: the limit on rows is fixed."""
        return None

    async def close(self) -> None:
        """Do nothing."""

    async def run(self) -> None:
        """Run until all rows have their answers."""
        while self._left:
            while sum(not one.done() for one in self._answers.values()) < min(self._in_flight, self._left):
                self._sent.clear()
                await self._sent.wait()
            engine = min((one for one in self._engines.values() if one.busy), key=lambda one: one.time.now)
            for output in engine.step():
                self.now = max(self.now, engine.time.now)
                if output.finish_reason is not None:
                    self._answers.pop(output.request_id).set_result(None)
                    self._left -= 1


async def run_batch(load: Load, replicas: int, planned: bool) -> tuple[float, float]:
    """Run a batch; return its rows per second, and the cached tokens of a row.

    Args:
        load: The batch.
        replicas: Engines that run it.
        planned: Whether the rows go in the order of their plan, in place of the order of the input.
    """
    with tempfile.TemporaryDirectory() as folder, _engines(replicas, load.kv_tokens) as engines:
        store = Store(Path(folder))
        content = Content(Path(folder), store.epoch, DiskContent(Path(folder)))
        _add_batch(store, content, load, planned)
        client = VirtualEngines(engines, load)
        runner = BatchRunner(
            store,
            content,
            client,
            KeyRules({"demo"}, limits_of()),
            concurrency=lambda: Fixed(load.in_flight * replicas),
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(runner.run())
            await client.run()
            runner.stop()
            await running
        store.close()
        return load.rows / max(engine.time.now for engine in engines), client.cached / load.rows


async def run_dataset(load: Load, replicas: int) -> tuple[float, float]:
    """Run the same rows as a dataset; return its rows per second, and the cached tokens of a row."""
    with _engines(replicas, load.kv_tokens) as engines:
        client = VirtualEngines(engines, load)
        rows: list[Result] = []
        drive = Drive(
            numbered(load.bodies()),
            Prompter(messages_column="messages"),
            client,
            {},
            rows.extend,
            concurrency=load.in_flight * replicas,
            observed=False,
            gather_s=0.0,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(drive.run())
            await client.run()
        assert len(rows) == load.rows
        return load.rows / max(engine.time.now for engine in engines), client.cached / load.rows


def _add_batch(store: Store, content: Contents, load: Load, planned: bool) -> None:
    """Store a batch that is validated."""
    draft = content.draft()
    for line in load.lines():
        draft.write(line)
    now = int(time.time())
    file = File(
        id="in",
        tenant="anna",
        filename="in.jsonl",
        purpose="batch",
        bytes=draft.size,
        created_at=now,
        expires_at=None,
    )
    limits = limits_of(max_lines=load.rows)
    with draft.open() as text:
        plan = read_rows(text, limits)
    assert not (errors := check(plan, CHAT, {"demo"}, load.rows)), errors
    add_file(store, content, draft, file, plan if planned else in_order_of_input(plan), limits)
    batch = Batch(
        id="b",
        tenant="anna",
        endpoint=CHAT,
        input_file="in",
        output_file="out",
        error_file="err",
        completion_window="24h",
        metadata={},
        retention_s=3600,
        created_at=now,
        expires_at=now + 86_400,
    )
    store.add_batch(batch, 1)
    store.move("b", "in_progress", now, total=len(plan), model=plan.model)


def in_order_of_input(plan: RowPlan) -> RowPlan:
    """Return a plan with the rows in the order of the input."""
    entries = [entry._replace(prefix=0, turn=number) for number, entry in enumerate(plan)]
    return RowPlan.of_entries(entries, plan.targets)


@contextmanager
def _engines(count: int, kv_tokens: int) -> "Iterator[list[VirtualEngine]]":
    """Return engines, each with a clock of its own."""
    # vLLM takes seconds to import.
    from tests.benchmarks.beside.virtual import HOST_S, SUBMIT_S
    from tests.serve_app.simulation.virtual_engine import LiveFirstEngine, virtual_engines

    device = PROFILES[DEVICE].model_dump() | {"load_s": 0.0, "kv_tokens": kv_tokens}
    with ExitStack() as stack:
        engines = []
        for _ in range(count):
            start = stack.enter_context(virtual_engines(LiveFirstEngine))
            engine = start(engine={"scheduling_policy": "priority"}, **device)
            engine.host_s, engine.submit_s = HOST_S, SUBMIT_S
            engines.append(engine)
        yield engines


def compare(load: Load, replicas: int) -> list[Row]:
    """Return the figures of both orders."""
    found = {}
    for name, planned in (("the order of the input", False), ("the order of the plan", True)):
        progress(f"{load.rows} rows, {load.prefixes} prefixes, {replicas} replicas: {name}")
        found[name] = asyncio.run(run_batch(load, replicas, planned))
    progress(f"{load.rows} rows, {load.prefixes} prefixes, {replicas} replicas: a dataset")
    found["a dataset"] = asyncio.run(run_dataset(load, replicas))
    progress("")
    (rate, _), (planned_rate, _), (dataset_rate, _) = found.values()
    kind = f"{load.prefixes or 'no'} shared prefixes, replicas: {replicas}"
    least = LEAST if load.prefixes else LEAST_APART
    return [
        *(Row(f"{kind}: rows/s in {name}", "rows/s", [rate]) for name, (rate, _) in found.items()),
        *(
            Row(f"{kind}: cached tokens of a row in {name}", "", [cached])
            for name, (_, cached) in found.items()
        ),
        Row(f"{kind}: the plan, of the order of the input", "x", [planned_rate / rate], at_least=least),
        Row(f"{kind}: a dataset, of the order of the input", "x", [dataset_rate / rate], at_least=least),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    about = (__doc__ or "").partition("\n\n")[2]
    parser = command.parser("tests.benchmarks.batches.order", about, results="batches-order.json")
    parser.add_argument("--rows", type=positive, default=2500, help="rows of a batch, for each replica")
    parser.add_argument("--prefixes", type=positive, default=200, help="prefixes, for each replica")
    parser.add_argument("--template", type=int, default=0, help="tokens in front of all prefixes")
    parser.add_argument("--replicas", type=positive, nargs="*", default=[1, 4], help="replicas (1 4)")
    parser.add_argument("--in-flight", type=positive, default=100, help="rows in flight on each replica")
    parser.add_argument("--seed", type=int, default=5, help="seed of all that is random")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for replicas in options.replicas:
        for prefixes in (options.prefixes * replicas, 0):
            load = Load(options.rows * replicas, prefixes, options.template, options.in_flight, options.seed)
            rows += compare(load, replicas)
    setting = (
        f"{options.rows} rows for each replica, in random order, on {DEVICE} in virtual time; prefixes of "
        f"{LENGTHS[0]} to {LENGTHS[1]} tokens, {options.prefixes} for each replica, {OWN_TOKENS} tokens of "
        f"a row's own, {OUTPUTS[0]} to {OUTPUTS[1]} out, {options.in_flight} rows in flight on each"
    )
    return command.publish(options, {"order": Table(setting, rows)})


if __name__ == "__main__":
    raise SystemExit(main())
