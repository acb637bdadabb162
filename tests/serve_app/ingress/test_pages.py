"""The page at `/` says what runs here and how to call it."""

from html.parser import HTMLParser

import pytest
from starlette.requests import Request

from serve_app.ingress.pages import base_url, page
from serve_app.settings.models import ModelSettings
from serve_app.settings.schema import parse

VOID = {"meta", "link", "br"}


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

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "pre" in self.open:
            self.blocks[-1] += data


def models(*ids: str) -> list[ModelSettings]:
    return parse({"models": [{"id": name, "source": "x"} for name in ids]}).models


def test_all_models_are_named() -> None:
    reader = Reader(page(models("demo", "org/other"), "http://host:8000"))
    assert "demo, org/other" in reader.text
    assert reader.open == []


def test_the_examples_call_this_service_and_its_first_model() -> None:
    curl, client = Reader(page(models("demo", "other"), "http://host:8000")).blocks
    assert "curl http://host:8000/generate" in curl
    assert '{"model": "demo", "prompts": [' in curl
    assert 'base_url="http://host:8000/v1"' in client
    assert 'model="demo"' in client
    compile(client, "example", "exec")


def test_a_function_is_called_as_a_function() -> None:
    functions = [
        {"id": "rank", "kind": "function", "target": "a:B"},
        {"id": "embed", "kind": "function", "target": "a:B", "embeddings": True},
        {"id": "other", "kind": "function", "target": "a:B"},
    ]
    (curl, *rest) = Reader(page(parse({"models": functions[:1]}).models, "http://host:8000")).blocks
    assert "curl http://host:8000/process" in curl
    assert '{"model": "rank", "records": [' in curl
    assert rest == []

    mixed = [*functions, {"id": "demo", "source": "x"}]
    blocks = Reader(page(parse({"models": mixed}).models, "http://host:8000")).blocks
    named = [name for block in blocks for name in ("rank", "embed", "other", "demo") if f'"{name}"' in block]
    assert named == ["rank", "embed", "embed", "demo", "demo"], "one of each kind, in the config's order"
    compile(blocks[2], "example", "exec")
    assert "embeddings.create" in blocks[2]


def test_a_pooling_model_is_called_for_vectors_or_scores() -> None:
    pooling = [
        {"id": name, "source": "x", "engine": {"runner": "pooling", "convert": convert}}
        for name, convert in (("embedder", "embed"), ("reranker", "classify"))
    ]
    client, curl = Reader(page(parse({"models": pooling}).models, "http://host:8000")).blocks
    assert 'embeddings.create(model="embedder"' in client
    assert "curl http://host:8000/v1/rerank" in curl
    assert '{"model": "reranker", "query": ' in curl


def test_links_stay_below_the_prefix_that_the_page_is_served_under() -> None:
    links = Reader(page(models("demo"), "http://host/prefix")).links
    assert {"v1/models", "health", "stats"} <= set(links)
    assert not any(link.startswith("/") for link in links)


def test_an_address_can_not_bring_html_of_its_own() -> None:
    # A client chooses the host that its request names.
    html = page(models("demo"), 'http://x"><script>alert(1)</script>')
    assert "<script" not in html
    Reader(html)


@pytest.mark.parametrize(
    ("headers", "url"),
    [
        ({}, "http://host:8000/prefix"),
        ({"x-forwarded-proto": "https"}, "https://host:8000/prefix"),
        ({"x-forwarded-proto": "javascript"}, "http://host:8000/prefix"),
    ],
)
def test_the_url_of_the_service_is_that_of_the_request_or_of_the_proxy_that_ends_tls(
    headers: dict[str, str], url: str
) -> None:
    sent = {"host": "host:8000"} | headers
    scope = {
        "type": "http",
        "scheme": "http",
        "path": "/prefix/",
        "root_path": "/prefix",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
    }
    assert base_url(Request(scope)) == url
