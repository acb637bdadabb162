"""Parts of the benchmark of adapters that can go wrong without a server."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serve_app.engine.adapters import WEIGHTS, AdapterFiles, check
from serve_app.engine.vllm.lora import lora_options
from serve_app.engine.vllm.options import vllm_args
from serve_app.settings.models import LLMSettings
from tests.benchmarks.adapters import flood, throughput
from tests.benchmarks.adapters.__main__ import DEVICES, PARTS, main, parser
from tests.benchmarks.adapters.files import MAX_RANK, with_adapters, write_adapters
from tests.benchmarks.adapters.flood import ALONE, ARRIVAL, BEYOND, FLOOD, capacity_of, send
from tests.benchmarks.adapters.traffic import POPULARITY, Arrival, Traffic, draw_adapters
from tests.benchmarks.serve.client import Answer
from tests.benchmarks.serve.models import MODELS
from tests.benchmarks.serve.servers import OURS, VLLM, vllm_command

NAMES = [f"a{number}" for number in range(8)]


# Adapters


def test_adapters_fit_the_demo_model_and_differ(tmp_path: Path) -> None:
    folders = write_adapters(tmp_path / "made", 3)
    weights = []
    files = AdapterFiles(tmp_path)
    for folder in folders.values():
        check(files.fetch(str(folder)), MAX_RANK, None)
        weights.append(load_file(folder / WEIGHTS))
    assert len(folders) == 3
    for one, other in itertools.combinations(weights, 2):
        assert one.keys() == other.keys()
        assert not any(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", ["demo", *DEVICES.values()])
def test_both_servers_have_the_same_adapters_and_slots(name: str, tmp_path: Path) -> None:
    folders = write_adapters(tmp_path / "adapters", 4)
    model = with_adapters(MODELS[name](tmp_path), folders, 2)
    theirs = make_arg_parser(FlexibleArgumentParser()).parse_args(vllm_command(model, 8000)[3:])
    settings = LLMSettings.model_validate({"id": "demo", **model.settings})
    files = AdapterFiles()
    try:
        options, fetched = lora_options(settings, files)
    finally:
        files.close()
    ours = vllm_args(settings, options)
    assert set(fetched) == {module.name for module in theirs.lora_modules} == set(folders)
    assert {module.path for module in theirs.lora_modules} == set(map(str, folders.values()))
    for option in (*model.engine, *model.lora):
        assert getattr(theirs, option) == getattr(ours, option), option
    assert (theirs.enable_lora, theirs.max_loras, theirs.max_cpu_loras) == (True, 2, 4)


# Traffic


def test_adapters_are_as_popular_as_they_should_be() -> None:
    for popularity, exponent in POPULARITY.items():
        drawn = draw_adapters(NAMES, 20_000, exponent, seed=1)
        assert (
            drawn
            == draw_adapters(NAMES, 20_000, exponent, seed=1)
            != draw_adapters(NAMES, 20_000, exponent, 2)
        )
        counts = Counter(drawn)
        relation = counts[NAMES[0]] / counts[NAMES[3]]
        assert relation == pytest.approx({"uniform": 1.0, "Zipf": 4.0}[popularity], rel=0.15)


def traffic(times: float, **changes: float) -> Traffic:
    return Traffic(2.0, times, 10, "", 1.0, 100.0)._replace(**changes)  # type: ignore[arg-type]


def until(traffic: Traffic, seconds: float) -> list[Arrival]:
    return list(itertools.takewhile(lambda arrival: arrival.at < seconds, traffic.arrivals(NAMES, seed=3)))


def test_a_flood_leaves_the_light_requests_as_they_are() -> None:
    alone, beside = until(traffic(0.0), 200.0), until(traffic(10.0), 200.0)
    assert alone == [arrival for arrival in beside if not arrival.flood]
    assert {arrival.adapter for arrival in alone} == set(NAMES[:-1])
    assert {arrival.adapter for arrival in beside if arrival.flood} == {NAMES[-1]}
    assert [arrival.at for arrival in beside] == sorted(arrival.at for arrival in beside)
    # 2 requests per second on each of seven adapters, and ten times two on the eighth.
    assert len(alone) / 200 == pytest.approx(14, rel=0.1)
    assert (len(beside) - len(alone)) / 200 == pytest.approx(20, rel=0.1)
    assert {arrival.tokens for arrival in alone} == {10}
    assert {arrival.tokens for arrival in beside if arrival.flood} == set(range(1, 21))


def test_phases_follow_from_the_capacity(tmp_path: Path) -> None:
    plan = flood.Plan(MODELS["l4-7b"](tmp_path), dict.fromkeys(NAMES, tmp_path), 5, 64, 64, 0.35, 10, 50, 60)
    phases = plan.phases(capacity=20.0)
    assert [(phase.times, phase.tenant) for phase in phases.values()] == [
        (0, ""),
        (10, ""),
        (50, ""),
        (50, "all"),
    ]
    for phase in phases.values():
        assert phase.rate == pytest.approx(1.0)
        assert phase.ends_s == 70.0


def test_the_begin_and_the_end_of_a_closed_loop_do_not_count() -> None:
    steady = [Answer(1, 1, 0.0, ended_at=10 + number / 4) for number in range(50)]
    slow = [Answer(1, 1, 0.0, ended_at=at) for at in (1.0, 5.0, 60.0, 90.0)]
    assert capacity_of([*slow, *steady]) == pytest.approx(4.0)


# Requests

STREAM = b"".join(
    b"%x\r\n%s\r\n" % (len(event), event)
    for event in (b'data: {"role"}\n\n', b'data: {"a"}\n\n', b'data: {"completion_tokens": 10}\n\n')
)


@asynccontextmanager
async def server(adapters: "Counter[str]", tenants: set[bytes], left: asyncio.Event) -> AsyncIterator[int]:
    """Run a server that answers streams and leaves all other requests waiting."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waits = False
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                body = json.loads(await reader.readexactly(int(lines[b"content-length"])))
                adapters[body["model"]] += 1
                tenants.add(lines.get(b"x-tenant", b""))
                waits = not body.get("stream")
                if not waits:
                    kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked"
                    writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"\r\n\r\n" + STREAM + b"0\r\n\r\n")
        except asyncio.IncompleteReadError:
            if waits:
                left.set()
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1]


@pytest.mark.parametrize("tenant", ["", "all"])
async def test_the_light_requests_of_the_measurement_count_and_the_flood_is_cut_off(tenant: str) -> None:
    adapters: Counter[str] = Counter()
    tenants: set[bytes] = set()
    left = asyncio.Event()
    load = Traffic(20.0, 5.0, 10, tenant, 0.1, 0.4)
    expected = [each for each in until(load, load.ends_s) if not each.flood and each.at >= load.warm_up_s]
    async with asyncio.timeout(60), server(adapters, tenants, left) as port:
        seen = await send(port, load, NAMES, 3, itertools.count())
        # Connections of the flood are closed, so that a server ends it.
        await left.wait()
    assert len(seen.light) == len(expected) > 10
    assert seen.sent > 10
    assert seen.flood == {}
    assert adapters[NAMES[-1]] <= seen.sent
    assert tenants == {tenant.encode()}
    assert seen.figures().keys() == {"total p50", "total p99", "ttft p50", "ttft p99"}


# Tables


def test_the_goal_is_for_the_flood_within_the_capacity() -> None:
    figures = {"total p50": 1.0, "total p99": 2.0, "ttft p50": 1.0, "ttft p99": 4.0}
    worse = figures | {"total p99": 2.2, "ttft p99": 6.0}
    found = {ALONE: [figures], FLOOD: [worse], BEYOND: [worse], ARRIVAL: [worse]}
    made = {row.what: row for row in flood.rows(found, {key: [0.5] for key in found})}
    assert made["time of an answer, p99: flood / alone"].median == pytest.approx(1.1)
    assert made["time of an answer, p99: flood / alone"].met
    assert made["time to first token, p99: flood / alone"].met is False
    assert made["time of an answer, p99: beyond capacity / alone"].met is None
    assert made["flood: share of the flood that was answered"].samples == [0.5]


def test_the_goal_of_the_throughput_is_for_a_slot_per_adapter(tmp_path: Path) -> None:
    adapters = dict.fromkeys(NAMES, tmp_path)
    plan = throughput.Plan(MODELS["h100-7b"](tmp_path), adapters, (8, 4), 1, 1.0)
    samples = {OURS: {"tokens_per_s": {0: 90.0}}, VLLM: {"tokens_per_s": {0: 100.0}}}
    made = throughput.tables(plan, {(slots, "Zipf"): samples for slots in (8, 4)})
    relation = "output tokens/s: saturate / vllm serve"
    met = {name: [row.met for row in table.rows if row.what == relation] for name, table in made.items()}
    assert list(met.values()) == [[False], [None]]
    assert "8 slots, Zipf" in next(iter(met))


def test_the_servers_of_a_pair_take_turns_in_going_first() -> None:
    order = throughput.visits((16, 8), 2)
    assert [server for _, _, server in order] == [OURS, VLLM] * 2 + [VLLM, OURS] * 2
    assert [slots for _, slots, _ in order] == [16, 16, 8, 8] * 2


# Command line


def test_every_part_has_a_device_of_its_own() -> None:
    assert DEVICES.keys() == PARTS.keys()
    assert set(DEVICES.values()) <= set(MODELS)
    assert parser().parse_args([]).slots[0] == throughput.ADAPTERS


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--light", "0"], ["--device", "tpu"]])
def test_a_wrong_option_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err
