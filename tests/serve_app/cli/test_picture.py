"""The picture of a service's figures, as `saturate top` prints it."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from batcher import BatchStats
from serve_app.cli.main import saturate
from tests.serve_app.cli.fake_service import FakeService, llm, stats_of


class Top:
    """`saturate top` in front of a service that says what a test wants."""

    def __init__(self) -> None:
        self.service = FakeService(lambda path, headers: (404, ""))

    def shown(self, body: Any, width: int = 200) -> str:
        """Return what is printed of a body of `/stats`."""
        self.service.answer = lambda path, headers: (200, body)
        result = CliRunner().invoke(saturate, ["top", self.service.url], env={"COLUMNS": str(width)})
        assert result.exit_code == 0, result.output
        assert all(len(line) <= width for line in result.stdout.splitlines())
        return result.stdout

    def drawn(self, models: Any, width: int = 200, **more: Any) -> str:
        """Return what is printed of what replicas report."""
        return self.shown(stats_of(models, **more).body(), width)


@pytest.fixture(scope="module")
def top() -> Iterator[Top]:
    found = Top()
    yield found
    found.service.stop()


def line(text: str, begin: str) -> str:
    """Return the line that begins so, with single spaces."""
    return next(" ".join(one.split()) for one in text.splitlines() if one.strip().startswith(begin))


def one(**stats: Any) -> dict[str, Any]:
    return {"demo": {"replicas": [llm("a", out=200, tenants={"acme": 500}, **stats)]}}


BUSY = one(
    running=48,
    running_cost=98_000,
    capacity=131_072,
    queue_depth=12,
    queue_classes={-1: (2, 10), 1: (10, 900)},
    ttft_p50_s=0.031,
    ttft_p99_s=0.4,
    wait_p50_s=0.0,
    wait_p99_s=1.44,
)


def test_a_line_has_all_figures_where_there_is_space(top: Top) -> None:
    text = top.drawn(BUSY)
    assert line(text, "model") == (
        "model state running waiting by tier KV cache tokens out tok/s in tok/s req/s "
        "TTFT p50 TTFT p99 wait p50 wait p99 busy"
    )
    assert line(text, "demo") == (
        "demo ready 1 48/64 12 2 priority, 10 flex 75% 98k/131k 200 400 5.0 31 ms 400 ms 0 ms 1.4 s 75%"
    )
    assert line(text, "acme") == "acme 250 2 40 8 500"


def test_a_narrow_terminal_keeps_the_more_important_columns(top: Top) -> None:
    heads = {width: line(top.drawn(BUSY, width), "model") for width in (160, 120, 100, 80, 60)}
    for wider, narrower in pairwise(heads.values()):
        assert len(narrower.split()) < len(wider.split())
    assert all("waiting" in head and "out tok/s" in head for head in heads.values())
    assert not any("busy" in heads[width] or "by tier" in heads[width] for width in (80, 60))
    for width in (40, 20):
        # `drawn` checks that the lines fit.
        top.drawn(BUSY, width)


def test_a_model_has_a_line_by_its_kind_and_state(top: Top) -> None:
    def turn(name: str, state: str) -> dict[str, Any]:
        return {"replicas": [llm(name) | {"turn": {"group": "gpu", "state": state}}]}

    models = {
        "goal": {"replicas": [llm("g", ttft_p99_s=0.4) | {"goals": {"ttft_p99_s": 0.5}}]},
        "two": {"replicas": [llm("aaa", running=2), {"replica": "bbb"}]},
        "missing": {"replicas": [llm("c"), llm("d")]},
        "awake": turn("eee", "awake"),
        "sleepy": turn("fff", "asleep"),
        "down": {"replicas": [], "error": "no answer\nat all"},
        "idle": {"replicas": []},
        "minilm": {"replicas": [{"replica": "f", "batcher": asdict(BatchStats(running=2))}]},
        "played": {"replicas": [llm("only")]},
    }
    health = {
        "missing": {"state": "ready", "replicas": 3},
        "idle": {"state": "asleep", "replicas": 0},
        "played": {"state": "ready", "replicas": 1, "simulated": "h100-8b"},
    }
    text = top.drawn(models, health=health)
    lines = "\n".join(" ".join(one.split()) for one in ("", *text.splitlines()))
    for begin in (
        "two ready 2 2/64",
        "aaa 2/64",
        "bbb no statistics",
        "missing ready 2/3",
        "awake ready 1",
        "eee awake",
        "sleepy asleep 1",
        "fff asleep",
        "down error",
        "down: no answer at all",
        "idle asleep",
        "minilm ready 1 2 0 -",
        "played: on a simulated device, h100-8b",
    ):
        assert f"\n{begin}" in lines
    assert "400 ms of 500 ms" in line(text, "goal")
    # A single ordinary replica has no line of its own.
    assert "only" not in text


def test_adapters_and_batches_have_a_line(top: Top) -> None:
    listed = [{"id": f"a{number}", "resident": number < 2} for number in range(20)]
    text = top.drawn({"demo": {"replicas": [llm("a") | {"adapters": listed}]}})
    assert line(text, "demo adapters").startswith("demo adapters (loaded in replicas) a0 1/1, a1 1/1, a2 0/1")
    assert "a7 0/1, 12 more" in text
    batches = {
        "batches": {"in_progress": 2, "validating": 0},
        "rows": {"waiting": 1_200, "in_flight": 64},
        "rows_per_s": 12.5,
        "eta_s": 96.0,
        "late": 1,
    }
    assert line(top.drawn({}, batches=batches), "batches") == (
        "batches: 2 in_progress · rows: 1.2k waiting, 64 in flight · 12 rows/s · 96.0 s left · 1 will be late"
    )
    assert "batches: none is open" in top.drawn({}, batches={"batches": {}})
    assert "batches: no replica" in top.drawn({}, batches={"error": "no replica"})


def test_a_large_fleet_has_a_bound(top: Top) -> None:
    models = {"demo": {"replicas": [llm(f"r{number}", tenants={f"t{number}": 1}) for number in range(300)]}}
    text = top.drawn(models)
    # 16 replicas and 10 tenants are shown.
    assert "284 more" in text
    assert "290 more" in text
    assert len(text.splitlines()) < 16 + 10 + 12


def test_names_can_not_steer_the_terminal_or_the_style(top: Top) -> None:
    text = top.drawn({"[bold]x\x1b[2J": {"replicas": [llm("a", tenants={"\x07[red]": 1})]}})
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]x" in text
    assert "[red]" in text


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=5), scalars, max_size=3)
entries = st.fixed_dictionaries(
    {},
    optional={
        "replica": anything,
        "batcher": st.dictionaries(
            st.sampled_from(
                ["running", "queue_depth", "queue_classes", "capacity", "running_cost", "wait_p99_s"]
            ),
            anything,
        ),
        "usage": st.fixed_dictionaries({}, optional={"tenants": anything, "engine": anything}),
        "rates": anything,
        "turn": anything,
        "adapters": anything,
    },
)


@given(st.lists(entries, max_size=3), anything, anything)
def test_a_service_of_another_version_breaks_nothing(
    top: Top, replicas: Any, total: Any, batches: Any
) -> None:
    """Entries are missing or mean something else; the figures that are there are shown."""
    models = {"m": {"replicas": replicas, "total": total}}
    top.shown({"models": models, "batches": batches}, 100)


@pytest.mark.parametrize(
    ("figure", "values"),
    [
        (
            "waiting",
            {
                None: "-",
                0: "0",
                950: "950",
                1_240: "1.2k",
                99_960: "100k",
                999_600: "1.0M",
                4 * 10**12: "4.0T",
            },
        ),
        ("output_tokens_per_s", {None: "-", 0.0: "0", 0.44: "0.4", 12.4: "12", 1_240.0: "1.2k"}),
        ("ttft_p99_s", {0.0: "0 ms", 0.0124: "12 ms", 0.9999: "1.0 s", 12.34: "12.3 s", 600.0: "10 min"}),
        ("kv_used", {None: "-", 0.0: "0%", 0.123: "12%"}),
    ],
)
def test_a_number_has_the_digits_that_matter(top: Top, figure: str, values: dict[Any, str]) -> None:
    figures = {"waiting": 5, "kv_used": 0.06, "output_tokens_per_s": 7.0, "ttft_p99_s": 0.008}
    shown = {"waiting": "5", "kv_used": "6%", "output_tokens_per_s": "7.0", "ttft_p99_s": "8 ms"}
    for value, text in values.items():
        total = {"running": 3} | figures | {figure: value}
        found = line(top.shown({"models": {"m": {"replicas": [], "total": total}}}), "m ")
        assert found == " ".join(["m unknown 3", *(shown | {figure: text}).values()])
