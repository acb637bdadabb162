"""Check of the models' sources: directories, and models of Hugging Face's hub."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx

from serve_app.cli.checks.finding import GIB, CheckInput, Finding, combined, gib, ok, problem, warning
from serve_app.settings.models import LLMSettings
from serve_app.settings.sources import DEMO_MODEL
from serve_app.system.home import below_home

HUB_S = 5.0
"""Timeout for an answer of the hub, in seconds."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

CACHE_LEAST, CACHE_USUAL = GIB, 20 * GIB
"""Bytes that every model needs, and bytes for a model with 8 billion parameters."""

LICENCE = "accept the licence on the model's page, and set HF_TOKEN to a token of that account"


def check_sources(case: CheckInput) -> Finding | None:
    """Check that the sources of the language models exist; None without such sources."""
    return combined([finding for model in case.needs.llms for finding in _model(case, model)])


def _model(case: CheckInput, model: LLMSettings) -> Iterator[Finding]:
    source = model.source
    if source == DEMO_MODEL or "://" in source:
        return
    place = below_home(source)
    if place.is_dir():
        yield ok(f"{source} is there")
    elif source.startswith(("/", "~", ".")):
        yield problem(f"{model.id}: {source} is not a directory here", "correct `source` of the model")
    elif HUB_ID.fullmatch(source):
        yield from _hub_model(case, model)


def _hub_model(case: CheckInput, model: LLMSettings) -> Iterator[Finding]:
    source = model.source
    cache = _cache(case)
    cached = any((cache / f"models--{source.replace('/', '--')}" / "snapshots").glob("*/*"))
    if _variable(case, "HF_HUB_OFFLINE").lower() in {"1", "true", "yes", "on"}:
        if cached:
            yield ok(f"{source} is in {cache}")
        else:
            yield problem(
                f"HF_HUB_OFFLINE is set, and {source} is not in {cache}",
                f"`hf download {source}` where the hub can be reached, or unset HF_HUB_OFFLINE",
            )
        return
    yield _reach(case, model, cached)
    if not cached:
        free = case.machine.space(cache).free
        text = f"{gib(free)} free in {cache} for {source}, which is not there yet"
        fix = "set HF_HOME to a larger disk; 16-bit weights take 2 GB per billion parameters"
        if free < CACHE_LEAST:
            yield problem(text, fix)
        elif free < CACHE_USUAL:
            yield warning(text, fix)


def _reach(case: CheckInput, model: LLMSettings, cached: bool) -> Finding:
    """Ask the hub whether it has the model's config.json, with a HEAD request."""
    source, token = model.source, _token(case)
    hub = (_variable(case, "HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    revision = model.engine.revision or "main"
    try:
        answer = httpx.head(
            f"{hub}/{source}/resolve/{revision}/config.json",
            headers=headers,
            timeout=HUB_S,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        text = f"{hub} can't be reached ({str(error) or type(error).__name__})"
        if cached:
            return warning(f"{text}; {source} is in the cache", "HF_HUB_OFFLINE=1 avoids the attempts")
        return problem(
            f"{text}, and {source} is not in the cache", "check the network, HTTPS_PROXY and HF_ENDPOINT"
        )
    code = answer.headers.get("x-error-code", "")
    status = answer.status_code
    if status < 400 or code == "EntryNotFound":
        return ok(f"{hub} has {source}{'' if token else ' (without a token)'}")
    if code == "GatedRepo" or status == 403:
        return problem(f"{source} is gated{'' if token else ', and there is no token'}", LICENCE)
    if status == 401 and token and code != "RepoNotFound":
        return problem(f"{hub} refuses the token", "set HF_TOKEN to a valid token, or `hf auth login`")
    if status in {401, 404}:
        return problem(
            f"{hub} has no {source} in revision {revision}, or it is private",
            "correct `source` of the model, or set HF_TOKEN to a token that may read it",
        )
    return warning(f"{hub} answers {status} for {source}", "try again later")


def _cache(case: CheckInput) -> Path:
    if given := _variable(case, "HF_HUB_CACHE"):
        return below_home(given)
    return _home(case) / "hub"


def _token(case: CheckInput) -> str:
    """Return the hub's token; empty without a token."""
    if given := _variable(case, "HF_TOKEN"):
        return given.strip()
    file = _variable(case, "HF_TOKEN_PATH")
    return (case.machine.read(below_home(file) if file else _home(case) / "token") or "").strip()


def _home(case: CheckInput) -> Path:
    home = _variable(case, "HF_HOME")
    caches = case.machine.environment.get("XDG_CACHE_HOME") or "~/.cache"
    return below_home(home or f"{caches}/huggingface")


def _variable(case: CheckInput, name: str) -> str:
    return case.needs.variable(name, case.machine.environment)
