"""Pooling routes of vLLM's own application, on an engine that the test plays."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.outputs import PoolingOutput, PoolingRequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.settings.sources import DEMO_MODEL
from tests.serve_app.engine.engine_doubles import CONTEXT
from tests.serve_app.engine.pooling_application import LIMIT_S, Application
from tests.serve_app.engine.pooling_models import make_classifier

EMBED = ("embed", "token_embed")
CLASSIFY = ("classify", "token_classify")


@pytest.fixture(scope="module")
def played() -> Iterator[None]:
    """An engine whose vectors are the length of the prompt and one, and whose scores are the length."""

    async def encode(
        llm: Any, prompt: Any, params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        ids = prompt["prompt_token_ids"]
        labels = llm.model_config.hf_config.num_labels
        found = [len(ids), 1.0] if params.task == "embed" else [len(ids) / CONTEXT] * labels
        yield PoolingRequestOutput(
            request_id=request_id,
            outputs=PoolingOutput(data=torch.tensor(found)),
            prompt_token_ids=ids,
            num_cached_tokens=0,
            finished=True,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncLLM, "encode", encode)
        yield


@pytest.fixture
async def embedder(played: None) -> AsyncIterator[Application]:
    async with AsyncExitStack() as stack:
        yield await Application(DEMO_MODEL, EMBED, convert="embed").start(stack)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with one class. The first look of vLLM on a machine takes 5 to 12 s."""
    source = str(make_classifier(tmp_path_factory.mktemp("models"), 1))
    Application(source, CLASSIFY)
    return source


@pytest.fixture
async def reranker(played: None, scorer: str) -> AsyncIterator[Application]:
    async with AsyncExitStack() as stack:
        yield await Application(scorer, CLASSIFY).start(stack)


async def test_a_model_that_embeds_has_vectors_and_scores_and_each_text_is_a_record(
    embedder: Application,
) -> None:
    assert {"/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score", "/tokenize"} <= embedder.routes
    assert not {"/classify", "/generate", "/v1/completions", "/v1/chat/completions"} & embedder.routes
    status, answer = await embedder.post("/v1/embeddings", input=["ab", "cde"])
    assert status == 200
    assert [item["embedding"] for item in answer["data"]] == [[2.0, 1.0], [3.0, 1.0]]
    assert answer["usage"]["prompt_tokens"] == 5
    assert embedder.site.batcher.stats.total_completed == 2
    status, answer = await embedder.post("/v1/rerank", query="q", documents=["abcd", "a"])
    assert [result["index"] for result in answer["results"]] == [1, 0]
    # The query and each document are embedded by themselves.
    assert embedder.site.batcher.stats.total_completed == 5
    # No text is tokenized outside a slot.
    assert len(embedder.tokenized) == 5
    assert min(embedder.tokenized) > 0
    embedder.site.check_free()


async def test_a_chat_is_embedded_through_the_template(embedder: Application) -> None:
    chat = [{"role": "user", "content": "hi"}]
    status, answer = await embedder.post("/v1/embeddings", messages=[chat, chat])
    assert (status, len(answer["data"])) == (200, 2)
    assert len(embedder.tokenized) == 2


@pytest.mark.parametrize("length", [CONTEXT + 1, 100_000])
async def test_a_text_beyond_the_context_is_a_400(embedder: Application, length: int) -> None:
    text = "x" * length
    for path, body in (
        ("/v1/embeddings", {"input": [text]}),
        ("/v1/rerank", {"query": "q", "documents": [text]}),
        ("/v1/score", {"text_1": text, "text_2": "b"}),
    ):
        status, answer = await embedder.post(path, **body)
        assert status == 400
        assert "context" in answer["error"]["message"]
    embedder.site.check_free()


async def test_a_text_may_be_cut_to_the_context(embedder: Application) -> None:
    text = "x" * (CONTEXT + 1)
    status, answer = await embedder.post("/v1/embeddings", input=text, truncate_prompt_tokens=-1)
    assert (status, answer["usage"]["prompt_tokens"]) == (200, CONTEXT)
    status, answer = await embedder.post("/v1/rerank", query="q", documents=[text, "a"], max_tokens_per_doc=7)
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 1 + 7 + 1)


async def test_a_model_with_one_class_scores_pairs(reranker: Application) -> None:
    assert {"/classify", "/v1/rerank", "/v1/score", "/score"} <= reranker.routes
    assert "/v1/embeddings" not in reranker.routes
    status, answer = await reranker.post("/v1/rerank", query="q", documents=["a", "abc"], top_n=1)
    assert status == 200
    assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [(1, 4 / CONTEXT)]
    assert answer["usage"]["prompt_tokens"] == 2 + 4
    # Each pair is a record.
    assert reranker.site.batcher.stats.total_completed == 2
    status, answer = await reranker.post("/v1/score", text_1=["a", "bb"], text_2=["c", "dd"])
    assert [one["score"] for one in answer["data"]] == [2 / CONTEXT, 4 / CONTEXT]
    status, answer = await reranker.post("/classify", input=["a", "bb"])
    assert [(one["label"], one["probs"]) for one in answer["data"]] == [
        ("class 0", [1 / CONTEXT]),
        ("class 0", [2 / CONTEXT]),
    ]


async def test_a_model_with_several_classes_scores_nothing(played: None, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        classifier = await Application(str(make_classifier(tmp_path, 3)), CLASSIFY).start(stack)
        assert "/classify" in classifier.routes
        assert not {"/v1/rerank", "/v1/score", "/v1/embeddings"} & classifier.routes
        status, answer = await classifier.post("/classify", input="a")
        assert (status, answer["data"][0]["num_classes"]) == (200, 3)


async def test_a_call_whose_client_leaves_holds_nothing(
    reranker: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def encode(*_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        begun.set()
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(AsyncLLM, "encode", encode)
    task = asyncio.ensure_future(reranker.post("/v1/rerank", query="q", documents=["a"] * 5))
    async with asyncio.timeout(LIMIT_S):
        await asyncio.wait(
            [task, begun_at := asyncio.ensure_future(begun.wait())], return_when="FIRST_COMPLETED"
        )
        assert begun_at.done(), task.result()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # A stop waits for the slots.
        await reranker.site.batcher.stop(drain=False)
    assert reranker.site.batcher.stats.running == 0
