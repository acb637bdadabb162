"""What is served: the model that answers a request, reported adapters and contexts, and cards."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.api.routes import OPENAI, SAME, TOKENIZING
from serve_app.ingress.models import ServedModels
from serve_app.settings.schema import parse
from serve_app.stats import ReplicaStats
from tests.batcher.virtual import until
from tests.fakes.clock import Clock

LLM: dict[str, Any] = {"id": "llm", "source": "x"}
OTHER: dict[str, Any] = {"id": "other", "source": "x"}
FUNCTION: dict[str, Any] = {"id": "rank", "kind": "function", "target": "a:B"}
EMBEDDER: dict[str, Any] = {"id": "embed", "kind": "function", "target": "a:B", "embeddings": True}

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"


class Replicas:
    """Replicas of the models; counts how often they are asked.

    Attributes:
        lengths: The context length of each model that has a replica.
        adapters: The adapters of each replica of the model `llm`.
        asked: The models whose replicas were asked.
        answers: They answer while this is set.
        woken: The models of which a replica was to start.
    """

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}
        self.adapters: list[list[JSON]] = []
        self.asked: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.woken: list[str] = []

    async def __call__(self, name: str) -> Sequence[ReplicaStats]:
        self.asked.append(name)
        await self.answers.wait()
        length = {"max_model_len": self.lengths[name]} if name in self.lengths else {}
        found = [length | {"adapters": adapters} for adapters in self.adapters] or [length][: len(length)]
        return [ReplicaStats.model_validate(entry) for entry in found]


def routing(
    *models: dict[str, Any], replicas: Replicas | None = None, clock: Clock | None = None
) -> ServedModels:
    replicas = replicas or Replicas()
    parsed = parse({"models": models}).models
    return ServedModels(parsed, replicas, replicas.woken.append, clock or Clock())


def refusal(name: str | None, path: str, *models: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        routing(*models).choose(name, path)
    assert caught.value.param == "model"
    return caught.value


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("llm", "/generate"),
        ("llm", CHAT),
        ("llm", "/tokenize"),
        # vLLM serves embedding models too; it knows better whether this is one.
        ("llm", EMBEDDINGS),
        ("rank", "/process"),
        ("embed", "/process"),
        ("embed", EMBEDDINGS),
    ],
)
def test_a_model_answers_where_its_kind_is_served(name: str, path: str) -> None:
    assert routing(LLM, FUNCTION, EMBEDDER).choose(name, path) == name


@pytest.mark.parametrize(
    ("name", "path", "where"),
    [
        ("rank", "/generate", "'rank' is a function: POST /process serves it, not /generate"),
        ("rank", CHAT, f"'rank' is a function: POST /process serves it, not {CHAT}"),
        ("rank", EMBEDDINGS, "POST /process serves it"),
        ("embed", "/generate", "POST /process and POST /v1/embeddings serve it"),
        ("llm", "/process", "'llm' is a language model: POST /generate and the OpenAI API serve it"),
    ],
)
def test_a_model_of_the_wrong_kind_says_where_it_is_served(name: str, path: str, where: str) -> None:
    error = refusal(name, path, LLM, FUNCTION, EMBEDDER)
    assert error.status == 400
    assert where in error.message


@pytest.mark.parametrize(
    ("path", "name"), [("/generate", "llm"), (CHAT, "llm"), ("/process", "embed"), (EMBEDDINGS, "embed")]
)
def test_the_only_model_of_a_route_may_be_left_out(path: str, name: str) -> None:
    assert routing(LLM, EMBEDDER).choose(None, path) == name


def test_a_function_that_has_no_vectors_is_no_choice_for_embeddings() -> None:
    assert routing(FUNCTION, EMBEDDER).choose(None, EMBEDDINGS) == "embed"
    assert routing(FUNCTION, LLM).choose(None, EMBEDDINGS) == "llm"


def test_of_several_the_request_has_to_name_one() -> None:
    error = refusal(None, "/process", LLM, FUNCTION, EMBEDDER)
    assert (error.status, error.message) == (400, "model: required, since several are served: rank, embed")
    assert "llm, other" in refusal(None, "/generate", LLM, OTHER, FUNCTION).message


def test_a_route_that_nothing_is_served_on_says_what_there_is() -> None:
    error = refusal(None, "/process", LLM)
    assert error.status == 400
    assert "No model answers /process here: 'llm' is a language model: POST /generate" in error.message
    assert "'rank' is a function: POST /process" in refusal(None, CHAT, FUNCTION).message


POOLED: dict[str, Any] = {"id": "pooled", "source": "x", "engine": {"runner": "pooling"}}
EMBED: dict[str, Any] = {"id": "vectors", "source": "x", "engine": {"runner": "pooling", "convert": "embed"}}
RERANK: dict[str, Any] = {"id": "scores", "source": "x", "engine": {"convert": "classify"}}


@pytest.mark.parametrize(
    ("model", "paths"),
    [
        (POOLED, {EMBEDDINGS, "/v1/classify", "/v1/rerank", "/v1/score", "/tokenize"}),
        (EMBED, {EMBEDDINGS, "/v1/rerank", "/v1/score", "/tokenize"}),
        (RERANK, {"/v1/classify", "/classify", "/v1/rerank", "/v2/rerank", "/score", "/v1/tokenize"}),
    ],
)
def test_a_pooling_model_answers_where_it_has_results(model: dict[str, Any], paths: set[str]) -> None:
    routes = routing(model)
    for path in (*paths, EMBEDDINGS, "/v1/classify", "/generate", CHAT, "/process", "/v1/messages"):
        if path in paths:
            assert routes.choose(model["id"], path) == routes.choose(None, path) == model["id"]
        else:
            assert f"not {path}" in refusal(model["id"], path, model).message


def test_a_pooling_model_says_what_it_serves() -> None:
    embed = refusal("vectors", "/generate", EMBED)
    assert embed.message == (
        "model: 'vectors' is a pooling model: POST /v1/embeddings, /v1/rerank and /v1/score serve it, "
        "not /generate"
    )
    assert "POST /v1/classify, /v1/rerank and /v1/score serve it" in refusal("scores", CHAT, RERANK).message


def test_a_pooling_model_goes_before_a_language_model_on_its_routes() -> None:
    models = routing(LLM, EMBED, RERANK)
    assert models.choose(None, EMBEDDINGS) == "vectors"
    assert models.choose(None, "/v1/classify") == "scores"
    assert models.choose(None, CHAT) == "llm"
    assert "several are served: vectors, scores" in refusal(None, "/v1/rerank", LLM, EMBED, RERANK).message
    assert "vectors, embed" in refusal(None, EMBEDDINGS, EMBED, EMBEDDER).message


def test_a_model_that_is_said_to_generate_has_no_vectors() -> None:
    generates = LLM | {"engine": {"runner": "generate"}}
    assert "is a language model" in refusal("llm", EMBEDDINGS, generates).message
    assert routing(generates).choose("llm", CHAT) == "llm"


def test_a_model_that_is_not_there() -> None:
    error = refusal("x", "/process", LLM, FUNCTION)
    assert (error.status, error.type) == (404, "not_found_error")
    assert error.message == "The model 'x' does not exist; served here: llm, rank"


# Models that a caller may use


@pytest.mark.parametrize("name", ["other", "embed", "none"])
def test_a_model_that_a_caller_may_not_use_does_not_exist_to_it(name: str) -> None:
    models = routing(LLM, OTHER, EMBEDDER)
    for ask in (
        lambda: models.choose(name, CHAT, {"llm", "gone"}),
        lambda: models.find(name, {"llm", "gone"}),
    ):
        with pytest.raises(RequestError) as caught:
            ask()
        error = caught.value
        assert (error.status, error.type, error.param) == (404, "not_found_error", "model")
        assert error.message == (
            f"The model {name!r} does not exist, or this API key has no access to it; it has access to: llm"
        )
    assert models.choose("llm", CHAT, {"llm"}) == "llm"
    assert models.find("llm", {"llm"}).id == "llm"


def test_a_caller_with_one_model_for_a_route_need_not_name_it() -> None:
    models = routing(LLM, OTHER, EMBEDDER)
    assert models.choose(None, CHAT, {"other", "embed"}) == "other"
    with pytest.raises(RequestError, match=r"several are served: llm, other$"):
        models.choose(None, CHAT, {"llm", "other"})
    with pytest.raises(
        RequestError, match="No model answers /process here: 'llm' is a language model"
    ) as caught:
        models.choose(None, "/process", {"llm"})
    assert "embed" not in caught.value.message
    with pytest.raises(RequestError, match="this API key has access to none"):
        models.choose(None, CHAT, {"gone"})


def test_the_models_of_a_caller_have_the_order_of_the_config() -> None:
    models = routing(LLM, OTHER, EMBEDDER)
    assert models.visible(None) == ["llm", "other", "embed"]
    assert models.visible({"embed", "llm", "gone"}) == ["llm", "embed"]


ADAPTED = LLM | {"adapters": [{"source": "org/words"}, {"source": "/secret/place/german", "id": "german"}]}


async def test_an_adapter_is_answered_by_its_model() -> None:
    replicas = Replicas()
    replicas.adapters = [[{"id": "llm:words"}, {"id": "german"}]]
    models = routing(ADAPTED, FUNCTION, replicas=replicas)
    assert list(models) == ["llm", "rank", "llm:words", "german"]
    assert (models.choose("german", CHAT), models.base_of("german")) == ("german", "llm")
    assert models.find("llm:words").id == "llm"
    with pytest.raises(RequestError, match="not /process"):
        models.choose("german", "/process")
    await models.refresh()
    with pytest.raises(RequestError, match="served here: llm, rank, llm:words, german"):
        models.find("words")


def test_without_a_name_a_request_goes_to_the_model_not_to_an_adapter() -> None:
    models = routing(ADAPTED)
    assert models.choose(None, CHAT) == "llm"
    with pytest.raises(RequestError) as caught:
        models.choose(None, CHAT, ["german"])
    assert caught.value.status == 400


def test_a_key_has_access_to_the_adapters_that_it_names() -> None:
    models = routing(ADAPTED)
    assert models.visible(["german"]) == ["german"]
    assert models.choose("german", CHAT, ["german"]) == "german"
    for name in ("llm", "llm:words"):
        with pytest.raises(RequestError, match="it has access to: german"):
            models.choose(name, CHAT, ["german"])


# Adapters that the replicas report


async def test_the_adapters_of_a_model_change_and_never_hide_a_model() -> None:
    replicas = Replicas()
    replicas.adapters = [[{"id": "new", "root": "new"}, {"id": "other", "root": "x"}]]
    models = routing(ADAPTED, OTHER, replicas=replicas)
    await models.refresh()
    assert list(models) == ["llm", "other", "new"]
    assert len(models) == 3
    assert models.base_of("other") == "other"


async def test_only_unknown_names_ask_the_replicas_and_not_too_often() -> None:
    replicas, clock = Replicas(), Clock()
    models = routing(ADAPTED, OTHER, FUNCTION, replicas=replicas, clock=clock)
    for name in ("llm", "llm:words", "other", "rank", None):
        await models.learn(name)
    assert replicas.asked == []
    for _ in range(3):
        await models.learn("more")
    assert replicas.asked == ["llm"]
    replicas.adapters = [[{"id": "more", "root": "more"}], []]
    clock.now = 5.0
    await models.learn("more")
    assert "more" in models
    assert "llm:words" not in models


async def test_a_model_without_replicas_keeps_its_adapters() -> None:
    replicas = Replicas()
    models = routing(ADAPTED, replicas=replicas)
    await models.refresh()
    assert replicas.asked == ["llm"]
    assert "llm:words" in models


async def test_an_unknown_name_is_final_only_once_each_model_has_told_its_adapters() -> None:
    replicas, clock = Replicas(), Clock()
    folder = {"adapters_folder": "/adapters"}
    models = routing(LLM | folder, OTHER | folder, FUNCTION, replicas=replicas, clock=clock)

    async def refused(name: str, allowed: set[str] | None = None) -> int:
        clock.now += 5.0
        await models.learn(name)
        with pytest.raises(RequestError) as caught:
            models.choose(name, CHAT, allowed)
        assert (caught.value.retry_after_s is None) == (caught.value.status == 404)
        return caught.value.status

    # No replica of either model has answered since this process started.
    assert [await refused(name) for name in ("llm:mine", "mine", "none")] == [503] * 3
    assert set(replicas.woken) == {"llm", "other"}
    # A name that the caller's key doesn't allow is not served to it, whatever is loaded.
    assert await refused("mine", {"llm"}) == 404
    # A model that is served already needs no adapters.
    assert models.choose("llm", CHAT) == "llm"
    replicas.woken.clear()
    replicas.adapters = [[{"id": "mine", "root": "mine"}]]
    clock.now += 5.0
    await models.learn("mine")
    assert models.choose("mine", CHAT) == "mine"
    assert await refused("none") == 404
    # The adapters stay known while a model has no replica.
    replicas.adapters = []
    assert (await refused("none"), replicas.woken) == (404, [])


async def test_a_service_without_adapters_asks_nobody() -> None:
    replicas = Replicas()
    await routing(LLM, FUNCTION, replicas=replicas).learn("unknown")
    assert replicas.asked == []


# Cards


async def test_a_card_has_the_fields_by_which_clients_size_their_context() -> None:
    replicas = Replicas()
    replicas.lengths = {"llm": 2048}
    models = routing(LLM, FUNCTION, replicas=replicas)
    llm = await models.card("llm")
    assert llm.pop("created") > 0
    assert llm == {
        "id": "llm",
        "object": "model",
        "owned_by": "saturate",
        "root": LLM["source"],
        "parent": None,
        "max_model_len": 2048,
        "permission": [],
        "kind": "llm",
        "routes": ["/generate", *(route for route in (*OPENAI, *TOKENIZING) if route not in SAME)],
    }
    function = await models.card("rank")
    assert (function["kind"], function["root"]) == ("function", FUNCTION["target"])
    assert function["max_model_len"] is None
    assert function["routes"] == ["/process"]
    with pytest.raises(RequestError, match="no access to it"):
        await models.card("llm", ["rank"])


async def test_a_card_says_which_device_is_simulated() -> None:
    models = routing({"id": "fast", "simulate": "h100-8b"}, LLM, FUNCTION)
    assert (await models.card("fast"))["simulated"] == "h100-8b"
    for name in ("llm", "rank"):
        assert "simulated" not in await models.card(name)


async def test_the_card_of_an_adapter_names_its_model_and_hides_its_place() -> None:
    replicas = Replicas()
    replicas.lengths = {"llm": 10}
    models = routing(ADAPTED, replicas=replicas)
    shown = await models.card("german")
    assert (shown["id"], shown["parent"], shown["root"]) == ("german", "llm", "german")
    shown = await models.card("llm:words")
    assert (shown["parent"], shown["root"], shown["max_model_len"]) == ("llm", "org/words", 10)


async def test_an_adapter_that_is_unloaded_meanwhile_is_shown_as_it_was() -> None:
    replicas = Replicas()
    replicas.adapters = [[]]
    models = routing(ADAPTED, replicas=replicas)
    cards = [models.card(name) for name in models.visible(None)]
    replicas.lengths = {"llm": 10}
    await models.refresh()
    assert list(models) == ["llm"]
    assert [(await card)["id"] for card in cards] == ["llm", "llm:words", "german"]


# Context lengths


SHORT: dict[str, Any] = {"id": "short", "source": "x", "engine": {"max_model_len": 512}}


async def test_a_replica_is_asked_once() -> None:
    replicas = Replicas()
    lengths = routing(LLM, SHORT, FUNCTION, replicas=replicas)
    replicas.lengths["llm"] = 2048
    assert [await lengths.context("llm") for _ in range(3)] == [2048] * 3
    assert replicas.asked == ["llm"]


@pytest.mark.parametrize("length", [2048, None])
async def test_requests_that_come_at_once_ask_the_replicas_once(length: int | None) -> None:
    replicas = Replicas()
    lengths = routing(LLM, SHORT, FUNCTION, replicas=replicas)
    if length is not None:
        replicas.lengths["llm"] = length
    replicas.answers.clear()
    waiting = [asyncio.ensure_future(lengths.context("llm")) for _ in range(3)]
    await until(lambda: bool(replicas.asked))
    # The one that asks leaves; another one asks then, for all.
    waiting.pop(0).cancel()
    await until(lambda: len(replicas.asked) == 2)
    replicas.answers.set()
    assert await asyncio.gather(*waiting) == [length, length]
    assert replicas.asked == ["llm", "llm"]


async def test_a_length_is_not_known_before_a_replica_runs_unless_the_config_states_it() -> None:
    replicas = Replicas()
    lengths = routing(LLM, SHORT, FUNCTION, replicas=replicas)
    assert (await lengths.context("llm"), await lengths.context("short")) == (None, 512)
    replicas.lengths = {"llm": 2048, "short": 256}
    assert (await lengths.context("llm"), await lengths.context("short")) == (2048, 256)


async def test_a_function_has_no_context() -> None:
    replicas = Replicas()
    assert await routing(LLM, SHORT, FUNCTION, replicas=replicas).context("rank") is None
    assert replicas.asked == []
