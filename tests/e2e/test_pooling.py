"""Pooling models on a live service: their results are those of the same weights in transformers."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from click.testing import CliRunner
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
)

from serve_app.api.protocol import JSON
from serve_app.cli.main import saturate
from serve_app.settings.sources import DEMO_FOLDER
from tests.e2e.service import Service
from tests.e2e.services import engine, local, wait_until
from tests.progress import ANSWER_S
from tests.serve_app.engine.pooling_models import make_classifier

pytestmark = pytest.mark.long

DEMO = DEMO_FOLDER / "model"
TEXTS = ["What is 47+28?", "What is 48+27?", "The capital of France"]
PIXEL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PER_DAY = 700
"""Tokens of a tenant's day: a short text reserves less, two of them more."""


def start(folder: Path, **models: JSON) -> Service:
    """Start a service of pooling models, by their ids; each may have `source` and `engine`."""
    config, app, demo = local()
    for name in ("enable_auto_tool_choice", "tool_call_parser"):
        demo["engine"].pop(name)
    demo.pop("sampling")
    demo["engine"] |= {"runner": "pooling", "dtype": "float32"}
    app["args"]["models"] = [
        demo | model | {"id": id, "engine": demo["engine"] | model.get("engine", {})}
        for id, model in models.items()
    ]
    app["args"]["usage"] = {
        "ledger": {"folder": str(folder / "usage")},
        "quotas": {"folder": str(folder / "quotas"), "tenants": {"few": {"tokens_per_day": PER_DAY}}},
    }
    deployment = engine(config) | {"ray_actor_options": {"num_cpus": 0}}
    others = [one for one in app["deployments"] if one["name"] != deployment["name"]]
    app["deployments"] = [*others, *(deployment | {"name": f"Engine:{id}"} for id in models)]
    return Service(config, folder)


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The demo model as one that embeds, and as a reranker."""
    folder = tmp_path_factory.mktemp("pooling")
    reranker = {"source": str(make_classifier(folder, 1))}
    service = start(folder, vectors={"engine": {"convert": "embed"}}, scores=reranker)
    yield service
    service.stop()
    assert service.processes() == [], "processes are left behind"


@pytest.fixture(scope="module")
def http(pooling: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pooling.url, timeout=ANSWER_S) as client:
        yield client


@pytest.fixture(scope="module")
def client(pooling: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pooling.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@cache
def embedder() -> Any:
    return AutoModel.from_pretrained(DEMO, dtype=torch.float32).eval()


def tokens(*texts: str) -> int:
    return sum(len(tokenizer()(text).input_ids) for text in texts)


@torch.inference_mode()
def embedding(text: str) -> torch.Tensor:
    """Return the normalized last state of the last token, as transformers computes it."""
    states = embedder()(**tokenizer()(text, return_tensors="pt")).last_hidden_state
    vector: torch.Tensor = torch.nn.functional.normalize(states[0, -1], dim=0)
    return vector


@torch.inference_mode()
def score(model: Any, query: str, document: str) -> float:
    """Return the score of a pair, as transformers computes it."""
    logits = model(**tokenizer()(query + document, return_tensors="pt")).logits
    return float(torch.sigmoid(logits)[0, 0])


def records(http: httpx.Client, model: str) -> int:
    """Return the records that the batcher of a model has completed."""
    (replica,) = http.get("/stats").json()["models"][model]["replicas"]
    done: int = replica["batcher"]["total_completed"]
    return done


def refusal(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    return message


def test_embeddings_are_those_of_the_same_weights_in_transformers(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    before = records(http, "vectors")
    answer = client.embeddings.create(model="vectors", input=TEXTS)
    assert [item.index for item in answer.data] == [0, 1, 2]
    for text, item in zip(TEXTS, answer.data, strict=True):
        found = torch.tensor(item.embedding)
        assert float(found @ embedding(text)) > 0.99
        assert float(found @ embedding(text[::-1])) < 0.99
    # The client asks for base64; lists of floats are the same.
    plain = client.embeddings.create(model="vectors", input=TEXTS[0], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-4)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens(*TEXTS)
    assert records(http, "vectors") - before == len(TEXTS) + 1
    ids = client.embeddings.create(model="vectors", input=[tokenizer()(TEXTS[0]).input_ids])
    assert float(torch.tensor(ids.data[0].embedding) @ embedding(TEXTS[0])) > 0.99


def test_a_model_that_embeds_ranks_by_the_cosine(http: httpx.Client) -> None:
    body = {"model": "vectors", "query": TEXTS[0], "documents": TEXTS[1:]}
    answer = http.post("/v1/rerank", json=body).json()
    expected = {i: float(embedding(TEXTS[0]) @ embedding(text)) for i, text in enumerate(TEXTS[1:])}
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert found == pytest.approx(expected, abs=0.01)
    assert [one["index"] for one in answer["results"]] == sorted(expected, key=lambda i: -expected[i])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_a_reranker_scores_as_in_transformers(pooling: Service, http: httpx.Client, path: str) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(
        pooling.folder / "classifier-1", dtype=torch.float32
    ).eval()
    query, documents = "a pet", ["A cat sleeps.", "Interest rates rose.", "7+5"]
    before = records(http, "scores")
    body = {"model": "scores", "query": query, "documents": documents}
    answer = http.post(path, json=body).json()
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    expected = {i: score(model, query, document) for i, document in enumerate(documents)}
    assert found == pytest.approx(expected, abs=0.02)
    assert answer["usage"]["prompt_tokens"] == tokens(*(query + each for each in documents))
    # Each pair is a record.
    assert records(http, "scores") - before == len(documents)
    best = http.post(path, json=body | {"top_n": 1}).json()["results"]
    assert [one["index"] for one in best] == [max(expected, key=lambda i: expected[i])]
    scored = http.post("/v1/score", json={"model": "scores", "text_1": query, "text_2": documents}).json()
    assert [one["score"] for one in scored["data"]] == pytest.approx(list(expected.values()), abs=0.02)
    for other in ("/v1/classify", "/classify"):
        classes = http.post(other, json={"model": "scores", "input": query + documents[0]}).json()["data"]
        assert classes[0]["label"] == "class 0"
        assert classes[0]["probs"] == pytest.approx([expected[0]], abs=0.02)


def test_a_route_that_a_model_does_not_serve_names_those_that_it_does(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    calls: list[tuple[str, str, JSON]] = [
        ("vectors", "/generate", {"prompts": ["a"]}),
        ("vectors", "/v1/chat/completions", chat),
        ("vectors", "/v1/classify", {"input": "a"}),
        ("vectors", "/process", {"records": ["a"]}),
    ]
    for model, path, body in calls:
        message = refusal(http.post(path, json={"model": model} | body))
        assert "POST /v1/embeddings, /v1/rerank and /v1/score serve it" in message
        assert f"not {path}" in message
    # The settings don't say that it has no vectors: the Engine does.
    message = refusal(http.post("/v1/embeddings", json={"model": "scores", "input": "a"}))
    assert message == "model: 'scores' serves /v1/classify, /v1/rerank and /v1/score, not /v1/embeddings"
    assert http.post("/v1/classify", json={"input": "a"}).status_code == 200
    assert "several are served" in refusal(http.post("/v1/rerank", json={"query": "a", "documents": ["b"]}))
    assert http.post("/tokenize", json={"model": "vectors", "prompt": "abc"}).json()["count"] == 3
    assert {model["id"] for model in http.get("/v1/models").json()["data"]} == {"vectors", "scores"}


def test_texts_that_do_not_fit_and_media_are_refused(http: httpx.Client) -> None:
    long = "x" * 3_000
    for path, body in (
        ("/v1/embeddings", {"model": "vectors", "input": ["a", long]}),
        ("/v1/rerank", {"model": "vectors", "query": "a", "documents": ["a", long]}),
        ("/v1/rerank", {"model": "scores", "query": "a", "documents": ["a", long]}),
        ("/v1/rerank", {"model": "scores", "query": "a", "documents": ["a", "x" * 1_000_000]}),
        ("/v1/classify", {"model": "scores", "input": long}),
    ):
        assert "context" in refusal(http.post(path, json=body))
    cut = http.post("/v1/embeddings", json={"model": "vectors", "input": long, "truncate_prompt_tokens": -1})
    assert cut.json()["usage"]["prompt_tokens"] == 2_048
    parts: list[tuple[str, JSON]] = [
        ("/v1/embeddings", {"model": "vectors", "messages": [{"role": "user", "content": [PIXEL]}]}),
        ("/v1/rerank", {"model": "scores", "query": "a", "documents": [{"content": [PIXEL]}]}),
    ]
    for path, body in parts:
        message = refusal(http.post(path, json=body))
        assert "'image_url' parts are not taken" in message
        assert "`multimodal`" in message


def test_the_ledger_and_the_quotas_count_prompts_without_output(pooling: Service, http: httpx.Client) -> None:
    headers = {"x-tenant": "table"}
    used = 0
    for path, body in (
        ("/v1/embeddings", {"model": "vectors", "input": TEXTS}),
        ("/v1/rerank", {"model": "scores", "query": TEXTS[0], "documents": TEXTS[1:]}),
    ):
        used += http.post(path, json=body, headers=headers).json()["usage"]["prompt_tokens"]

    def rows() -> list[JSON]:
        arguments = ["usage", str(pooling.folder / "usage"), "--format", "json"]
        found = json.loads(CliRunner().invoke(saturate, arguments).stdout)["rows"]
        return [row for row in found if row["tenant"] == "table"]

    wait_until(lambda: sum(row["calls"] for row in rows()) == 2)
    assert sum(row["prompt_tokens"] for row in rows()) == used
    assert sum(row["output_tokens"] for row in rows()) == 0

    few = {"x-tenant": "few"}
    small = http.post("/v1/embeddings", json={"model": "vectors", "input": "abc"}, headers=few)
    assert small.status_code == 200
    assert small.headers["x-ratelimit-limit-tokens"] == str(PER_DAY)
    large = http.post("/v1/embeddings", json={"model": "vectors", "input": ["abc"] * 3}, headers=few)
    assert f"tenant few: tokens_per_day {PER_DAY}" in refusal(large)


def make_encoder(folder: Path) -> Path:
    """Make an encoder of random weights with the demo model's tokenizer; return its directory."""
    path = folder / "encoder"
    tokenizer().save_pretrained(path)
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = BertConfig(vocab_size=len(tokenizer()), max_position_embeddings=256, pad_token_id=256, **sizes)
    BertModel(config).save_pretrained(path)
    return path


def test_an_encoder_without_kv_cache_runs_many_texts_at_once(tmp_path: Path) -> None:
    path = make_encoder(tmp_path)
    options = {"max_model_len": 256, "max_num_batched_tokens": 1_024}
    service = start(tmp_path, encoder={"source": str(path), "engine": options})
    try:
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=ANSWER_S) as client:
            texts = [f"{text} {number}" for number in range(50) for text in TEXTS]
            answer = client.embeddings.create(model="encoder", input=texts)
        stats = httpx.get(f"{service.url}/stats", timeout=ANSWER_S).json()["models"]["encoder"]["replicas"]
        assert stats[0]["batcher"]["capacity"] == 2 * options["max_num_batched_tokens"]
        model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
        with torch.inference_mode():
            for text, item in zip(texts[:6], answer.data, strict=False):
                states = model(**tokenizer()(text, return_tensors="pt")).last_hidden_state
                # The first token's state is the vector of a BERT.
                expected = torch.nn.functional.normalize(states[0, 0], dim=0)
                assert float(torch.tensor(item.embedding) @ expected) > 0.999
    finally:
        service.stop()
