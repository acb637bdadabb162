"""Command line of the batches' benchmark: python -m tests.benchmarks.batches --help."""

import argparse
import asyncio
import gc
import selectors
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from pydantic_core import from_json, to_json

from batcher.stats import percentiles
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling
from serve_app.jobs.service import BatchService
from serve_app.settings.batches import BatchesSettings
from serve_app.system.garbage_collection import collect_rarely
from serve_app.wire.frame import unpack
from serve_app.wire.request import RelayRequest
from tests.benchmarks import command
from tests.benchmarks.batches.engines import MODEL, Handle, client_of
from tests.benchmarks.command import above_0, positive
from tests.benchmarks.measuring import Row, Table, progress

CHAT = "/v1/chat/completions"
PIECE_BYTES = 1 << 20
POLL_S = 0.02
REST_S = 10.0
LIMIT_MS = 50.0
BOUNDARY = "b0undary"


class Turns(selectors.DefaultSelector):
    """The selector of an event loop, which measures the CPU time of the loop's turns.

    While a turn lasts, no request is answered. On a machine with other load, its CPU time tells more than the
    latency of requests.

    Attributes:
        cpu_s: Seconds of CPU of each turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cpu_s: list[float] = []
        self._began = time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events."""
        self.cpu_s.append(time.thread_time() - self._began)
        found = super().select(timeout)
        self._began = time.thread_time()
        return found


class Service:
    """The parts of the Batches deployment in this process, asked by relayed requests."""

    def __init__(self, service: BatchService) -> None:
        self._service = service

    async def ask(self, method: str, path: str, tenant: str, body: JSON | None = None) -> bytes:
        """Return the body of an answer; raise if it isn't 200."""
        text = b"" if body is None else to_json(body)
        request = RelayRequest(method, path, b"", [], text, Scheduling(1, tenant))
        return await self._answer(request)

    async def upload(self, path: Path, tenant: str) -> str:
        """Upload a file in pieces, as the Ingress does; return its id."""
        kind = f"multipart/form-data; boundary={BOUNDARY}".encode()
        request = RelayRequest(
            "POST", "/v1/files", b"", [(b"content-type", kind)], b"", Scheduling(1, tenant), upload="u"
        )
        answering = asyncio.ensure_future(self._answer(request))
        for piece in form(path):
            await self._service.uploads.put("u", piece, False)
        await self._service.uploads.put("u", b"", True)
        return str(from_json(await answering)["id"])

    async def _answer(self, request: RelayRequest) -> bytes:
        pieces = []
        async for message in self._service.relay(request):
            piece = unpack(message)
            if piece.head is not None and piece.head.status != 200:
                raise RuntimeError(f"{request.method} {request.path}: {piece.head.status} {piece.body!r}")
            pieces.append(piece.body)
        return b"".join(pieces)


def form(path: Path) -> Iterator[bytes]:
    """Yield the multipart body of an upload."""
    yield (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{BOUNDARY}\r\n'
        f'Content-Disposition: form-data; name="file"; filename="{path.name}"\r\n\r\n'
    ).encode()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
    yield f"\r\n--{BOUNDARY}--\r\n".encode()


def write_input(path: Path, lines: int, size: int) -> None:
    """Write an input file of so many lines and bytes."""
    with path.open("wb") as file:
        for number in range(lines):
            start = {"custom_id": f"row-{number}", "method": "POST", "url": CHAT}
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
            filler = size // lines - len(to_json(start | {"body": body})) - 1
            body["messages"] = [{"role": "user", "content": "x" * max(1, filler)}]
            file.write(to_json(start | {"body": body}) + b"\n")


class Poller:
    """A client that lists and retrieves all the time.

    Attributes:
        seconds: Latencies by what was asked.
        resident: Resident MiB of this process, at each poll.
    """

    def __init__(self, service: Service, tenant: str, batch: str | None = None) -> None:
        self._service = service
        self._tenant = tenant
        self._paths = {"list batches": "/v1/batches", "list files": "/v1/files"}
        if batch is not None:
            self._paths["retrieve a batch"] = f"/v1/batches/{batch}"
        self.seconds: dict[str, list[float]] = {}
        self.resident: list[float] = []

    async def run(self) -> None:
        """Poll until it is cancelled."""
        this = psutil.Process()
        while True:
            for what, path in self._paths.items():
                begun = time.perf_counter()
                await self._service.ask("GET", path, self._tenant)
                self.seconds.setdefault(what, []).append(time.perf_counter() - begun)
            self.resident.append(this.memory_info().rss / 2**20)
            await asyncio.sleep(POLL_S)


async def measure(options: argparse.Namespace, folder: Path, turns: Turns) -> Table:
    """Return the figures of batches that run at once, each of a tenant of its own."""
    input = folder / "input.jsonl"
    write_input(input, options.lines, options.bytes)
    settings = BatchesSettings(
        folder=str(folder / "batches"), max_file_bytes=max(200 << 20, 2 * options.bytes)
    )
    handle = Handle(options.places, options.row_s, options.answer_bytes)
    opened = await BatchService.open(settings, client_of(handle), {MODEL})
    service = Service(opened)
    # As Ray Serve does it in a replica.
    gc.collect()
    gc.freeze()
    collect_rarely()
    baseline = psutil.Process().memory_info().rss / 2**20
    tenants = [f"tenant-{number}" for number in range(options.batches)]
    uploads, files = [], []
    for tenant in tenants:
        progress(f"batches: upload of {tenant}")
        begun = time.perf_counter()
        files.append(await service.upload(input, tenant))
        uploads.append(time.perf_counter() - begun)
    at_rest = Poller(service, tenants[-1])
    polling = asyncio.create_task(at_rest.run())
    progress("batches: at rest")
    await asyncio.sleep(REST_S)
    await end(polling)
    turns.cpu_s.clear()
    begun, cpu = time.perf_counter(), time.process_time()
    fields = {"endpoint": CHAT, "completion_window": "24h"}
    for tenant, file in zip(tenants, files, strict=True):
        body = await service.ask("POST", "/v1/batches", tenant, fields | {"input_file_id": file})
    poller = Poller(service, tenants[-1], from_json(body)["id"])
    polling = asyncio.create_task(poller.run())
    done = await finish(opened, options.batches * options.lines, options.limit_s, polling)
    elapsed, cpu = time.perf_counter() - begun, time.process_time() - cpu
    await end(polling)
    await opened.close(5.0)
    progress("")
    setting = (
        f"{options.batches} batches at once, each of a tenant, {options.lines:,} lines and {options.bytes:,} "
        f"bytes; the engines are doubles with {options.places} places, a row takes {options.row_s:g} s, its "
        f"answer has {options.answer_bytes:,} bytes. In {elapsed:.0f} s, {done:,} rows were done; meanwhile "
        "a client asks all the time. Latencies are those of the deployment, without the way to it. A turn of "
        "the event loop, in which nothing is answered, is CPU time: other load changes it little."
    )
    rows = [
        Row("upload", "MB/s", [options.bytes / 1e6 / seconds for seconds in uploads]),
        Row("rows per second", "rows/s", [done / elapsed]),
        Row("CPU per row", "us", [cpu / max(1, done) * 1e6]),
        Row("a turn of the event loop, 99.9 of 100", "ms", [percentiles(turns.cpu_s, (0.999,))[0] * 1e3]),
        Row("a turn of the event loop, longest", "ms", [max(turns.cpu_s) * 1e3], at_most=LIMIT_MS),
        Row("resident memory before", "MiB", [baseline]),
        Row("resident memory, most", "MiB", [max(poller.resident)]),
    ]
    for what, seconds in poller.seconds.items():
        p50, p99 = percentiles(seconds, (0.5, 0.99))
        rows.append(Row(f"{what}, p50", "ms", [p50 * 1e3]))
        rows.append(Row(f"{what}, p99", "ms", [p99 * 1e3], at_most=LIMIT_MS))
        rows.append(Row(f"{what}, slowest", "ms", [max(seconds) * 1e3]))
    for what, seconds in at_rest.seconds.items():
        rows.append(Row(f"{what}, p99, without batches", "ms", [percentiles(seconds, (0.99,))[0] * 1e3]))
    return Table(setting, rows)


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task, and wait for its end."""
    task.cancel()
    await asyncio.wait([task])


async def finish(service: BatchService, rows: int, limit_s: float, polling: asyncio.Task[None]) -> int:
    """Wait for the rows, as long as the limit allows; return how many are done."""
    ends = time.perf_counter() + limit_s
    while True:
        stats = await service.stats()
        done = int(stats["rows"]["completed"] + stats["rows"]["failed"])
        if done >= rows or time.perf_counter() > ends or polling.done():
            return done
        progress(f"batches: {done:,} of {rows:,} rows, {stats['rows_per_s']:,.0f}/s")
        await asyncio.sleep(1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = command.parser(
        "tests.benchmarks.batches",
        "Measure the Batches deployment in a process, with engines that take no CPU: memory, rows "
        "per second, and the latency of its routes.",
        results="batches.json",
    )
    parser.add_argument("--batches", type=positive, default=10, help="batches at once")
    parser.add_argument("--lines", type=positive, default=50_000, help="lines of each")
    parser.add_argument("--bytes", type=positive, default=200_000_000, help="bytes of each")
    parser.add_argument("--places", type=positive, default=512, help="rows that the engines run at once")
    parser.add_argument("--row-s", type=above_0, default=0.5, help="seconds that a row takes")
    parser.add_argument("--answer-bytes", type=positive, default=2_000, help="bytes of an answer")
    parser.add_argument("--limit-s", type=above_0, default=1200.0, help="seconds after which it ends")
    options = parser.parse_args(arguments)
    turns = Turns()
    with (
        command.place() as folder,
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner,
    ):
        table = runner.run(measure(options, folder, turns))
    return command.publish(options, {f"batches, {options.batches} of {options.lines} lines": table})


if __name__ == "__main__":
    sys.exit(main())
