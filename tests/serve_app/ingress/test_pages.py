"""The files of the page at `/`: their headers, their addresses, and what they read of the service."""

import json
import re
from dataclasses import fields
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from batcher import BatchStats, ContinuousStats
from serve_app.auth.key_store import OPEN
from serve_app.auth.keys import hash_key
from serve_app.ingress.deployment import Ingress
from serve_app.settings.schema import parse
from serve_app.stats import Rates, Total
from tests.pages import read
from tests.serve_app.ingress.engine_doubles import Client, Engine, application, check_error, echo, health

__all__ = ["health"]

FILES = {
    "/": ("html", "text/html; charset=utf-8"),
    "/page.css": ("css", "text/css; charset=utf-8"),
    "/page.js": ("js", "text/javascript; charset=utf-8"),
}
HTML, CSS, SCRIPT = TEXTS = [read(f"serve_app/ingress/page/page.{kind}") for kind, _ in FILES.values()]
BROWSER = {"accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
KEY = "sk-ada"

VOID = {"meta", "link", "br", "input"}


class Reader(HTMLParser):
    """The text of a page, its links, and whether its tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.links: list[str] = []
        self.open: list[str] = []
        self.blocks: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag == "pre":
            self.blocks.append("")
        self.links += [value for name, value in attrs if name == "href" and value]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Parts of a drawing have no content."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "pre" in self.open:
            self.blocks[-1] += data


@pytest.mark.parametrize(("path", "text"), [*zip(FILES, TEXTS, strict=True)], ids=[*FILES])
async def test_a_file_has_a_strict_policy_and_is_asked_for_again_by_its_tag(path: str, text: str) -> None:
    async with Client() as client:
        response = await client.get(path)
        again = await client.get(path, headers={"if-none-match": f'W/{response.headers["etag"]}, "other"'})
        other = await client.get(path, headers={"if-none-match": '"other"'})
    assert response.status_code == other.status_code == 200
    assert response.headers["content-type"] == FILES[path][1]
    assert response.text == text
    assert (again.status_code, again.content) == (304, b"")
    for answer in (response, again):
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "data:",
            "frame-ancestors": "'none'",
            "base-uri": "'none'",
            "form-action": "'none'",
        }
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    ("path", "headers", "location"),
    [
        ("/stats", {}, None),
        ("/stats", {"accept": "application/json"}, None),
        ("/stats?format=json", BROWSER, None),
        ("/stats", BROWSER, "./#live"),
        ("/stats?format=html", BROWSER, "./#live"),
        ("/stats/", BROWSER, "../#live"),
        ("/stats.html", {}, "./#live"),
        ("/stats.html/", BROWSER, "../#live"),
    ],
)
async def test_a_browser_is_sent_to_the_live_view_and_a_program_gets_json(
    path: str, headers: dict[str, str], location: str | None
) -> None:
    async with Client() as client:
        response = await client.get(path, headers=headers)
    if location is None:
        assert set(response.json()["models"]) == {"demo"}
        return
    assert response.status_code == 307
    assert response.headers["location"] == location
    # Another client of a cache gets the figures at the same address.
    assert (response.headers["vary"], response.headers["cache-control"]) == ("accept", "no-store")


@pytest.mark.parametrize("prefix", ["/guarded", "/team/llm"])
async def test_the_page_is_below_a_prefix(prefix: str) -> None:
    transport = httpx.ASGITransport(application({"demo": Engine(echo)}), root_path=prefix)
    async with httpx.AsyncClient(transport=transport, base_url="http://saturate") as client:
        response = await client.get(prefix)
        assert response.status_code == 307
        assert str(response.url.join(response.headers["location"])) == f"http://saturate{prefix}/"
        page = await client.get(f"{prefix}/")
        for name in re.findall(r'(?:src|rel="stylesheet" href)="([^"]+)"', page.text):
            assert (await client.get(page.url.join(name))).status_code == 200
        live = await client.get(f"{prefix}/stats", headers=BROWSER)
        assert str(live.url.join(live.headers["location"])) == f"http://saturate{prefix}/#live"


async def test_the_files_need_no_key_and_the_figures_do(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"name": "ada", "sha256": hash_key(KEY.encode()), "tenant": "research"}
    monkeypatch.setenv("KEYS", json.dumps([entry]))
    settings = parse({"models": [{"id": "demo", "source": "x"}], "access": {"keys_env": "KEYS"}})
    engines: Any = {"demo": Engine(echo)}
    transport = httpx.ASGITransport(Ingress(settings, engines).__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://saturate") as client:
        for path in FILES:
            assert (await client.get(path)).status_code == 200
        for path in ("/stats", "/stats.html"):
            assert (await client.get(path, headers=BROWSER)).headers["location"] == "./#live"
        for path in ("/stats", "/stats?format=json", "/v1/models", "/page.txt"):
            check_error(await client.get(path, headers={"accept": "*/*"}), 401, "authentication_error", None)
    assert set(FILES) < OPEN


def test_the_page_has_no_script_or_style_in_its_html_and_needs_nothing_from_elsewhere() -> None:
    reader = Reader(HTML)
    assert reader.open == []
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", HTML)
    assert re.findall(r"<script\b[^>]*>[^<]*", HTML) == ['<script src="page.js" defer>']
    assert not re.search(r"@import|url\(", CSS)
    addresses = set(re.findall(r"https?://[^\s\"'`]+", HTML + CSS + SCRIPT))
    # A namespace, which is never requested.
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not any(link.startswith("/") for link in reader.links)
    assert {"docs", "openapi.json", "health", "version", "stats?format=json"} <= set(reader.links)


def test_texts_enter_the_page_as_text() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b", SCRIPT)
    assert not re.search(r"localStorage|document\.cookie", SCRIPT)


def test_its_script_finds_its_elements() -> None:
    asked = set(re.findall(r'byId\("([\w-]+)"\)', SCRIPT))
    assert len(asked) > 50
    # The script itself makes the field of a chat.
    assert asked <= {*re.findall(r'\bid="([\w-]+)"', HTML), "field-text"}


def test_it_reads_statistics_that_there_are() -> None:
    read = set(re.findall(r"\bbatcher\.([a-z]+_\w+)", SCRIPT))
    (counts,) = re.findall(r"const COUNTS = (\[.*?\]);", SCRIPT)
    read |= {f"total_{kind}" for kind in json.loads(counts)}
    assert {"queue_depth", "running_cost", "wait_p99_s", "total_rejected"} <= read
    known = {one.name for kind in (ContinuousStats, BatchStats) for one in fields(kind)}
    assert read <= known
    sums = set(re.findall(r'\bnow\.(\w+)|series\("(\w+)"\)', SCRIPT))
    sums = {name for names in sums for name in names if name}
    assert {"ttft_p99_s", "output_tokens_per_s", "kv_used", "tpot_s"} <= sums <= set(Total.model_fields)
    assert set(re.findall(r"\brates\?\.(\w+)", SCRIPT)) <= set(Rates.model_fields)


def test_it_explains_its_words() -> None:
    assert not re.search(r'"requests"|requests/s', SCRIPT)
    (note,) = re.findall(r'<p class="soft note">.*?</p>', HTML, re.DOTALL)
    assert all(word in note for word in ("A record is", "TTFT (time", "TPOT (time", "A tenant <code>key-"))


def test_the_page_is_small() -> None:
    # A browser gets all of it with its first request, as it is.
    assert sum(len(text.encode()) for text in (HTML, CSS, SCRIPT)) <= 70_000
