"""The pages for people: `/` has the models and examples, `/docs` the API, `/stats.html` live figures."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from starlette.requests import Request

from serve_app.api.protocol import JSON
from serve_app.api.routes import EMBEDDINGS, PROCESS
from serve_app.settings.models import ModelSettings

STATS_PAGE = Path(__file__).with_name("stats_page.html").read_text()
"""Shows `/stats` as it changes; a page without other files."""

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>saturate</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem; }}
pre {{ background: #f4f4f4; padding: 1rem; overflow-x: auto; border-radius: 6px; }}
td, th {{ text-align: left; padding: .2rem 1.5rem .2rem 0; }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #16181c; color: #ddd; }} pre {{ background: #23262c; }} a {{ color: #8ab4f8; }}
}}
</style>
<h1>saturate</h1>
<p>Models served here: {models}.</p>
<h2>Call it</h2>
{examples}
<h2>Routes</h2>
<table>
<tr><td><code>POST /generate</code></td><td>a list of prompts in, a list of results out</td></tr>
<tr><td><code>POST /process</code></td><td>a list of records in, a list of results out</td></tr>
<tr><td><code>/v1/…</code></td><td>the OpenAI API, as vLLM has it: chats, embeddings, scores</td></tr>
<tr><td><a href="docs"><code>GET /docs</code></a></td><td>all routes and their fields</td></tr>
<tr><td><a href="v1/models"><code>GET /v1/models</code></a></td><td>the models</td></tr>
<tr><td><a href="health"><code>GET /health</code></a></td><td>200 once a model can answer</td></tr>
<tr><td><a href="stats"><code>GET /stats</code></a></td><td>each replica's batcher: JSON, or live</td></tr>
</table>
</html>
"""


_LLM = """<pre>curl {url}/generate -H 'content-type: application/json' \\
  -d '{{"model": "{model}", "prompts": ["What is 47+28?"], "temperature": 0}}'</pre>
<pre>from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.chat.completions.create(
    model="{model}", messages=[{{"role": "user", "content": "What is 47+28?"}}])
print(answer.choices[0].message.content)</pre>"""

_FUNCTION = """<pre>curl {url}/process -H 'content-type: application/json' \\
  -d '{{"model": "{model}", "records": ["What is 47+28?"]}}'</pre>"""

_EMBEDDINGS = """<pre>from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.embeddings.create(model="{model}", input=["What is 47+28?"])
print(answer.data[0].embedding)</pre>"""

_RERANK = """<pre>curl {url}/v1/rerank -H 'content-type: application/json' \\
  -d '{{"model": "{model}", "query": "a pet", "documents": ["A cat sleeps.", "Rates rose."]}}'</pre>"""


def base_url(request: Request) -> str:
    """Return the URL of the service, as the client of a request reaches it."""
    url = request.base_url
    # A proxy that ends TLS says so. A client that says so itself misleads itself only.
    if (scheme := request.headers.get("x-forwarded-proto")) in {"http", "https"}:
        url = url.replace(scheme=scheme)
    return str(url).rstrip("/")


def page(models: Sequence[ModelSettings], url: str) -> str:
    """Return the page as HTML.

    Args:
        models: The models to show.
        url: Where clients reach this service.
    """
    names = ", ".join(f"<code>{escape(model.id)}</code>" for model in models)
    examples: dict[str, str] = {}
    for model in models:
        # One example of each kind, with its first model.
        examples.setdefault(_example(model), model.id)
    blocks = [example.format(url=escape(url), model=escape(name)) for example, name in examples.items()]
    return _PAGE.format(models=names, examples="\n".join(blocks))


def _example(model: ModelSettings) -> str:
    """Return an example of a call to a model of this kind."""
    if not model.pools:
        return _LLM
    examples = [_FUNCTION] if PROCESS in model.routes else []
    if EMBEDDINGS in model.routes:
        examples.append(_EMBEDDINGS)
    return "\n".join(examples or [_RERANK])


def wants_page(request: Request) -> bool:
    """Return whether a request for `/stats` comes from a browser that shows the answer."""
    if request.url.path.endswith(".html"):
        return True
    return "text/html" in request.headers.get("accept", "") and request.query_params.get("format") != "json"


_DOCS = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>saturate · API</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
td, th {{ text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0; overflow-wrap: anywhere; }}
section {{ border-top: 1px solid #8886; margin-top: 1.5rem; }}
p {{ white-space: pre-line; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #16181c; color: #ddd; }} a {{ color: #8ab4f8; }} }}
</style>
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
    return _DOCS.format(index="\n".join(index), operations="\n".join(operations), schemas="\n".join(schemas))


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
