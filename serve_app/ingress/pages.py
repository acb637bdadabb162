"""The pages for people: `/` has the chat, batches, live figures and use of keys, `/docs` the API."""

import base64
import hashlib
import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from serve_app.api.errors import path_of
from serve_app.api.protocol import JSON

FOLDER = Path(__file__).with_name("page")

FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
"""The files of the page and their types, by route. They say nothing about the service, and need no key."""

LIVE = "/stats.html"
"""The former address of the live figures."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        # The icon of the page is in its HTML.
        "img-src data:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
)

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # A browser asks each time, and gets a 304 for the same file: replicas of two versions may answer.
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """Return the routes of the files of the page, and of its former address."""
    files = [Route(path, _file(name, media_type)) for path, (name, media_type) in FILES.items()]
    return [*files, Route(LIVE, to_live_view)]


def _file(name: str, media_type: str) -> Any:
    """Return the endpoint of a file."""
    content = (FOLDER / name).read_bytes()
    tag = hashlib.sha256(content).hexdigest()[:32]
    headers = HEADERS | {"etag": f'"{tag}"'}

    async def send(request: Request) -> Response:
        # A proxy that compresses makes the tag a weak one.
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return send


async def to_live_view(request: Request) -> Response:
    """Redirect to the live figures of the page."""
    # Relative: a proxy in front may have taken a prefix off the path.
    up = "../" if request.scope.get("raw_path", b"").endswith(b"/") else "./"
    return RedirectResponse(f"{up}#live", headers={"vary": "accept", "cache-control": "no-store"})


def with_slash(scope: Scope) -> Response:
    """Return a redirect from a prefix to the page below it, whose addresses are relative."""
    return RedirectResponse(f"./{scope['path'].rpartition('/')[2]}/")


def wants_page(scope: Scope) -> bool:
    """Return whether a request for `/stats` comes from a browser that shows the answer."""
    if path_of(scope) != "/stats":
        return False
    request = Request(scope)
    return "text/html" in request.headers.get("accept", "") and request.query_params.get("format") != "json"


_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0; overflow-wrap: anywhere; }
section { border-top: 1px solid #8886; margin-top: 1.5rem; }
p { white-space: pre-line; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd; } a { color: #8ab4f8; } }
"""

DOCS_HEADERS = HEADERS | {
    "content-security-policy": POLICY.replace(
        "style-src 'self'",
        f"style-src 'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'",
    )
}
"""Headers of `/docs`, whose style is in its HTML."""

_DOCS = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>saturate · API</title>
<style>{style}</style>
<h1>API</h1>
<p>The routes that this service serves, from <a href="openapi.json">openapi.json</a>.</p>
<table>
{index}
</table>
{operations}
<h2>Schemas</h2>
{schemas}
</html>
"""

_REFERENCE = "#/components/schemas/"


def docs_page(document: JSON) -> str:
    """Return the page that shows an OpenAPI document; it loads nothing.

    Args:
        document: The document.
    """
    index, operations = [], []
    named = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            name, text = escape(f"{method.upper()} {path}"), escape(operation.get("summary", ""))
            id = escape(operation["operationId"])
            index.append(f'<tr><td><a href="#{id}"><code>{name}</code></a></td><td>{text}</td></tr>')
            operations.append(f'<section id="{id}"><h2><code>{name}</code></h2><p>{text}</p>')
            fields = [
                (one["name"], one["schema"], f"in the {one['in']}") for one in operation.get("parameters", ())
            ]
            operations.append(_fields(fields))
            for kind, body in operation.get("requestBody", {}).get("content", {}).items():
                operations.append(f"<p>Body, {escape(kind)}: {_type(body['schema'])}</p>")
                name = body["schema"].get("$ref", "").removeprefix(_REFERENCE)
                operations.append(_properties(named.get(name, body["schema"])))
            for status, answer in operation["responses"].items():
                kinds = ", ".join(
                    f"{escape(kind)} {_type(content['schema']) if content.get('schema') else ''}"
                    for kind, content in answer.get("content", {}).items()
                )
                operations.append(f"<p>{escape(status)}: {escape(answer['description'])} {kinds}</p>")
            operations.append("</section>")
    schemas = [
        f'<section id="{escape(name)}"><h3><code>{escape(name)}</code></h3>'
        f"<p>{escape(schema.get('description', ''))}</p>{_properties(schema) or _type(schema)}</section>"
        for name, schema in named.items()
    ]
    return _DOCS.format(
        style=_STYLE, index="\n".join(index), operations="\n".join(operations), schemas="\n".join(schemas)
    )


def _properties(schema: JSON) -> str:
    """Return the fields of an object as a table."""
    required = schema.get("required", ())
    return _fields(
        (name, field, "required" if name in required else "")
        for name, field in schema.get("properties", {}).items()
    )


def _fields(fields: Iterable[tuple[str, JSON, str]]) -> str:
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td>{_type(schema)}</td><td>{escape(note)}</td>"
        f"<td>{escape(schema.get('description', ''))}</td></tr>"
        for name, schema, note in fields
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _type(schema: Any) -> str:
    """Return the type of a value in words."""
    if not isinstance(schema, dict):
        return "any"
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_REFERENCE))
        return f'<a href="#{name}">{name}</a>'
    for kind in ("anyOf", "oneOf", "allOf"):
        if kind in schema:
            return " or ".join(dict.fromkeys(_type(branch) for branch in schema[kind]))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kinds = schema.get("type", "any")
    words = escape(kinds if isinstance(kinds, str) else " or ".join(kinds))
    return f"list of {_type(schema['items'])}" if words == "array" and "items" in schema else words
