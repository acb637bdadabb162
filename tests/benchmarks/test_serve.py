"""Parts of the service's benchmark that can go wrong without a server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serve_app.engine.vllm.options import vllm_args
from serve_app.settings.models import LLMSettings
from serve_app.simulation.profiles import PROFILES
from tests.benchmarks.serve.__main__ import main
from tests.benchmarks.serve.client import Answer, Connections
from tests.benchmarks.serve.loads import ALL_LOADS, CHUNK, DEVICE_LOADS, SERIES
from tests.benchmarks.serve.models import MODELS
from tests.benchmarks.serve.servers import DEFAULT_ON_DEVICE, OURS, VLLM, flags
from tests.benchmarks.serve.tables import DEVICE_TARGETS, targets
from tests.benchmarks.serve.ways import Run, ways


def test_time_between_bursts_does_not_count() -> None:
    answers = [Answer(1, 1, sent_at=2.0, ended_at=3.0), Answer(1, 1, sent_at=5.0, ended_at=6.5)]
    assert Run(answers, 0.0, {}).took_s == 4.5
    assert Run(answers, 0.0, {}, idle_s=2.0).took_s == 2.5


WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@asynccontextmanager
async def server(*connections: Sequence[bytes]) -> AsyncIterator[int]:
    """Run a server that sends these answers, one to a request, and then closes; yield its port."""
    left = iter(connections)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in next(left):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening, asyncio.timeout(20):
        yield listening.sockets[0].getsockname()[1]


async def statuses(port: int, requests: int) -> list[int]:
    """Send requests one after the other; return the status of each answer."""
    connections = Connections(port)
    found = [(await connections.post("/", b"", Answer(1, 1, 0.0))).status for _ in range(requests)]
    connections.close()
    return found


async def test_an_idle_connection_that_the_server_closes_costs_no_request() -> None:
    async with server([WHOLE, b""], [WHOLE]) as port:
        assert await statuses(port, 2) == [200, 200]


@pytest.mark.parametrize("served", [[b""], [WHOLE, WHOLE[:-1]]], ids=["at once", "within an answer"])
async def test_a_connection_that_breaks_is_an_error(served: Sequence[bytes]) -> None:
    async with server(served) as port:
        with pytest.raises(ConnectionError):
            await statuses(port, 2)


def test_texts_of_all_loads_and_series_differ() -> None:
    series = {name: 10 * number % 100 for number, name in enumerate(ALL_LOADS)}
    assert len({series[name] for name in DEVICE_LOADS}) == len(DEVICE_LOADS)
    for load in ALL_LOADS.values():
        assert load.count <= SERIES


def test_prompts_of_a_list_have_one_length_and_lists_differ() -> None:
    prompts = DEVICE_LOADS["device-lists"].prompts(1.0, 3)
    lists = [{p.tokens for p in prompts[at : at + CHUNK]} for at in range(0, len(prompts), CHUNK)]
    assert {len(lengths) for lengths in lists} == {1}
    assert len(set.union(*lists)) > 10
    again = DEVICE_LOADS["device-lists"].prompts(1.0, 4)
    assert [p.tokens for p in again] == [p.tokens for p in prompts]
    assert not {p.text for p in again} & {p.text for p in prompts}


def test_long_prompts_differ_in_their_last_bytes_only() -> None:
    one, other = DEVICE_LOADS["device-long"].prompts(0.0, 0)[:2]
    assert len(one.text) == 220 * 1024
    assert one.text != other.text
    assert one.text[:-128] == other.text[:-128]


def test_every_load_of_a_device_reaches_both_servers() -> None:
    for load in DEVICE_LOADS.values():
        assert {OURS, VLLM} <= set(ways(load))


def test_targets_are_those_of_the_device() -> None:
    assert set(DEVICE_TARGETS) <= set(PROFILES) <= set(MODELS)
    for loads in DEVICE_TARGETS.values():
        assert set(loads) <= set(DEVICE_LOADS)
    assert targets("device-1", "l4-7b") != targets("device-1", "h100-7b")
    for name in DEVICE_LOADS:
        assert targets(name, "h100-70b-tp4")
    assert DEFAULT_ON_DEVICE[:2] == [OURS, VLLM]


@pytest.mark.parametrize("name", PROFILES)
def test_both_servers_run_on_the_same_device(name: str, tmp_path: Path) -> None:
    device = MODELS[name](tmp_path)
    theirs = make_arg_parser(FlexibleArgumentParser()).parse_args(flags(device.engine))
    ours = vllm_args(LLMSettings.model_validate({"id": "demo", **device.settings}))
    for option in device.engine:
        assert getattr(theirs, option) == getattr(ours, option), option
    assert theirs.additional_config["simulate"]["name"] == name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "h100-7b", "--only", "stream-1"], "stream-1: not a load for this"),
        (["--only", "device-1"], "device-1: not a load for this"),
        (["--device", "h100-7b", "--server", "ray.serve.llm"], "ray.serve.llm: doesn't run on a simulated"),
        (["--device", "h100-7b", "--model", "75m"], "--model and --device exclude each other"),
    ],
)
def test_options_that_contradict_each_other(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
