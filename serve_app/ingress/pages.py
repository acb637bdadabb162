"""The pages for people: at `/` the models and how to call them, at `/stats.html` live statistics."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from starlette.requests import Request

from serve_app.api.routes import EMBEDDINGS
from serve_app.settings.models import FunctionSettings, ModelSettings

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
    if not isinstance(model, FunctionSettings):
        if pooled := model.engine.pooling_routes:
            return _EMBEDDINGS if EMBEDDINGS in pooled else _RERANK
        return _LLM
    return f"{_FUNCTION}\n{_EMBEDDINGS}" if model.embeddings else _FUNCTION


def wants_page(request: Request) -> bool:
    """Return whether a request for `/stats` comes from a browser that shows the answer."""
    if request.url.path.endswith(".html"):
        return True
    return "text/html" in request.headers.get("accept", "") and request.query_params.get("format") != "json"
