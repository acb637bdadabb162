"""The statistics page in a browser, in front of a fake service."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from batcher import BatchStats, ContinuousStats
from serve_app.ingress.pages import STATS_PAGE, wants_page
from tests.progress import STILL_S, run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
LIMIT_S = STILL_S

LLM = ContinuousStats(
    total_submitted=5200,
    total_completed=5000,
    total_failed=3,
    total_cancelled=17,
    total_rejected=41,
    queue_depth=12,
    queue_cost=1800,
    queue_classes={0: (9, 1300), 1: (3, 500)},
    running=48,
    running_cost=98_000,
    capacity=131_072,
    max_running=64,
    busy_time_s=300.0,
    wait_p50_s=0.012,
    wait_p99_s=1.4,
    run_p50_s=0.9,
    run_p99_s=4.2,
    output_tokens=100_000,
)
FUNCTION = BatchStats(
    total_completed=900, total_batches=100, avg_batch_size=9.0, padding_ratio=0.11, busy_time_s=20.0
)

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no browser (Debian's package `chromium` is one)"
)


class FakeService(BaseHTTPRequestHandler):
    """Serves the page, and statistics that grow with every request."""

    asked = 0

    def do_GET(self) -> None:
        if self.path.startswith("/stats.html"):
            self._send("text/html", STATS_PAGE)
        elif self.path == "/stats":
            FakeService.asked += 1
            self._send("application/json", json.dumps(report(FakeService.asked)))
        else:
            self.send_error(404)

    def _send(self, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("content-type", f"{kind}; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def report(step: int) -> dict[str, Any]:
    """Return the statistics of the `step`th request."""
    waves = (step * 7) % 11
    first = replace(
        LLM,
        total_completed=5000 + 40 * step,
        output_tokens=100_000 + 2_000 * step,
        running=40 + waves,
        running_cost=90_000 + 2_000 * waves,
        busy_time_s=300.0 + 0.9 * step,
    )
    second = replace(first, queue_depth=0, queue_classes={}, running=20, running_cost=41_000)
    return {
        "models": {
            "demo": {
                "replicas": [
                    {"replica": "wlpttx3i", "batcher": asdict(first), "usage": used(3_000)},
                    {"replica": "a3v9rxga", "batcher": asdict(second), "usage": used(500)},
                ]
            },
            "minilm": {"replicas": [{"replica": "uo3am0dc", "batcher": asdict(FUNCTION)}]},
            "asleep": {"replicas": []},
            "<b>odd": {"replicas": [], "error": "no <i>answer"},
        },
        "batches": {
            "batches": {"in_progress": 2, "validating": 0},
            "rows": {"waiting": 1_200, "in_flight": 64, "completed": 30, "failed": 1},
            "rows_per_s": 12.5,
            "eta_s": 96.0,
            "oldest_s": 30.0,
            "late": 0,
        },
        "quotas": {
            "holders": 3,
            "limits": {
                "key <u>ada": {"max_concurrency": limit(8, 8)},
                "tenant acme": {
                    "tokens_per_day": limit(100_000, 4_000),
                    "tokens_per_minute": limit(900, 300),
                },
            },
        },
    }


def limit(most: int, remaining: int) -> dict[str, Any]:
    """Return the state of a limit."""
    return {"limit": most, "remaining": remaining, "reserved": 0, "ends_in_s": 40.0}


def used(prompt: int) -> dict[str, Any]:
    """Return the usage of a replica."""
    sums = {"calls": 7, "prompt": prompt, "cached": 1_200, "output": 40, "cost": 0}
    return {"tenants": {"<i>acme": sums, "bits": sums | {"prompt": 1}}, "own": sums}


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeService)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/stats.html"
    server.shutdown()
    thread.join(STILL_S)
    server.server_close()


def browse(url: str, folder: Path, *flags: str) -> str:
    """Return the output of headless Chromium after some seconds on the page."""
    assert CHROMIUM
    done = run(
        # Virtual time passes as fast as the page is idle.
        [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "--virtual-time-budget=8000", *flags, url],
        check=True,
    )
    return done.stdout


@pytest.mark.long
@needs_chromium
def test_the_numbers_of_the_service_are_on_the_page(url: str, tmp_path: Path) -> None:
    FakeService.asked = 0
    dom = browse(url, tmp_path / "profile", "--dump-dom")
    assert FakeService.asked >= 3
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", dom[: dom.index("<script>")]))
    assert "live" in text
    for shown in (
        "demo 2 replicas",
        "9 default, 3 flex",
        "wlpttx3i",
        "1.4 s",
        "asleep asleep",
        "9.0 to a batch",
        # The usage of both replicas together.
        "tenant calls prompt tokens cached tokens output tokens &lt;i&gt;acme 14 3.5K 2.4K 80 bits 14 2",
        "Batches 2 in_progress · rows: 1.2K waiting, 64 in flight, 30 completed, 1 failed · 13 rows/s · "
        "96.0 s left",
        # The fullest limit comes first.
        "Quotas 2 of keys and tenants of limit at most used left new in "
        "tenant acme tokens per day 100K 96 % 4K 40.0 s tenant acme tokens per minute 900 67 % 300 40.0 s "
        "key &lt;u&gt;ada max concurrency 8 0 % 8 ",
    ):
        assert shown in text, (shown, text)
    assert "of 262K tokens" in text
    # Names from outside are rendered as text.
    assert "<b>odd" not in dom
    assert "&lt;b&gt;odd" in dom
    assert len(re.findall(r"<svg", dom)) == 6 + 6


@pytest.mark.long
@needs_chromium
@pytest.mark.parametrize("flags", [[], ["--blink-settings=preferredColorScheme=0"]], ids=["light", "dark"])
def test_it_renders_in_light_and_dark(url: str, tmp_path: Path, flags: list[str]) -> None:
    picture = tmp_path / "stats.png"
    browse(url, tmp_path / "profile", f"--screenshot={picture}", "--window-size=1200,1100", *flags)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_it_reads_statistics_that_there_are() -> None:
    script = STATS_PAGE[STATS_PAGE.index("<script>") :]
    read = set(re.findall(r"\b(?:batcher|stats|each)\.([a-z]+_\w+)", script))
    read |= set(re.findall(r'\bof\("(\w+)"\)', script))
    (counts,) = re.findall(r"const COUNTS = (\[.*?\]);", script)
    read |= {f"total_{kind}" for kind in json.loads(counts)}
    assert {"queue_depth", "running_cost", "wait_p99_s", "total_rejected"} <= read
    known = asdict(LLM) | asdict(FUNCTION)
    assert {name for name in read if name not in known and not hasattr(LLM, name)} == set()


def test_its_script_finds_its_elements() -> None:
    asked = set(re.findall(r'getElementById\("(\w+)"\)', STATS_PAGE))
    assert asked == {"models", "state"}
    assert asked <= set(re.findall(r'\bid="(\w+)"', STATS_PAGE))


def test_it_has_one_unit_and_explains_its_words() -> None:
    assert not re.search(r'"requests"|requests/s', STATS_PAGE)
    (note,) = re.findall(r'<p class="note">.*?</p>', STATS_PAGE, re.DOTALL)
    assert all(word in note for word in ("A record is", "A tenant <code>key-"))


def test_it_needs_nothing_from_elsewhere() -> None:
    addresses = set(re.findall(r"https?://[^\s\"'`]+", STATS_PAGE))
    # A namespace, which is never requested.
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in STATS_PAGE


@pytest.mark.parametrize(
    ("path", "accept", "query", "page"),
    [
        ("/stats", "*/*", "", False),
        ("/stats", "application/json", "", False),
        ("/stats", "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8", "", True),
        ("/stats", "text/html", "format=json", False),
        ("/stats.html", "*/*", "", True),
    ],
)
def test_programs_get_json_and_browsers_get_the_page(path: str, accept: str, query: str, page: bool) -> None:
    scope = {"type": "http", "path": path, "query_string": query.encode(), "headers": []}
    scope["headers"] = [(b"accept", accept.encode()), (b"host", b"localhost")]
    scope |= {"server": ("localhost", 80), "scheme": "http", "root_path": ""}
    assert wants_page(Request(scope)) is page
