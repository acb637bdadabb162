"""Routes of vLLM's own application that clients can reach, with everything in it switched on."""

from collections.abc import Iterator
from typing import Any

from serve_app.api.protocol import JSON
from tests.serve_app.ingress.engine_doubles import Client, check_error, health

__all__ = ["health"]

REACHED = {
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/tokenize",
    "/detokenize",
}
"""Routes that are served on purpose, all by POST; a new one is added here after a look at what it does."""

ADMINISTRATIVE = {
    "/sleep",
    "/wake_up",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/reset_prefix_cache",
    "/tokenizer_info",
    "/metrics",
    "/collective_rpc",
    "/pause",
    "/abort_requests",
    "/server_info",
    "/update_weights",
    "/start_profile",
    "/scale_elastic_ep",
}
"""Some that have to be among those that were tried."""


SCORED = {"queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"}

PROMPTS = {
    "/v1/chat/completions": {"documents"},
    "/v1/chat/completions/batch": {"messages"},
    "/v1/completions": {"prompt", "prompt_embeds"},
    "/v1/responses": {"input"},
    "/v1/embeddings": {"input", "messages"},
    "/classify": {"input"},
    **dict.fromkeys(("/v1/score", "/score"), SCORED),
    **{path: {"documents"} for path in ("/v1/rerank", "/v2/rerank", "/rerank")},
}
"""Lists of prompts, or of texts that are put into one: `max_prompts` holds for them."""

PARTS_OF_ONE = {
    *("tools", "system", "include", "previous_input_messages"),
    *("stop", "stop_sequences", "stop_token_ids", "bad_words", "allowed_token_ids", "logprob_token_ids"),
    # Token ids of one text.
    "tokens",
    "timestamp_granularities[]",
}
"""Other lists, in which nothing is a prompt of its own; a new one is added here after a look at its use."""


def lists(app: JSON, path: str) -> set[str]:
    """Return the fields of a route that may be lists."""
    schemas = app["openapi"]["components"]["schemas"]

    def branches(schema: JSON) -> Iterator[JSON]:
        if "$ref" in schema:
            schema = schemas[schema["$ref"].rpartition("/")[2]]
        yield schema
        for kind in ("anyOf", "oneOf", "allOf"):
            for branch in schema.get(kind, ()):
                yield from branches(branch)

    (content,) = app["openapi"]["paths"][path]["post"]["requestBody"]["content"].values()
    return {
        name
        for body in branches(content["schema"])
        for name, field in body.get("properties", {}).items()
        if any(branch.get("type") == "array" for branch in branches(field))
    }


async def test_no_list_of_prompts_is_longer_than_the_limit_on_any_route(vllm_app: JSON) -> None:
    found = {path: lists(vllm_app, path) - PARTS_OF_ONE for path in REACHED}
    for path, fields in found.items():
        # A list of messages is one chat.
        fields -= set() if path in {"/v1/chat/completions/batch", "/v1/embeddings"} else {"messages"}
    assert {path: fields for path, fields in found.items() if fields} == PROMPTS
    items: list[Any] = ["x", [5], {"content": []}, None]
    async with Client(max_prompts=3) as client:
        for path, fields in PROMPTS.items():
            for field in fields:
                for item in items:
                    response = await client.post(path, json={field: [item] * 4})
                    message = check_error(response, 400, "invalid_request_error", field)
                    assert "at most 3 are allowed" in message
                    # One that no route reads as an item may be refused as such.
                    assert "are allowed" not in (await client.post(path, json={field: [item] * 3})).text
        for path, field in (("/generate", "prompts"), ("/generate", "messages")):
            check_error(await client.post(path, json={field: ["x"] * 4}), 400, "invalid_request_error", field)


async def test_only_what_clients_need_is_reached(vllm_app: JSON) -> None:
    routes: list[tuple[str, list[str]]] = vllm_app["routes"]
    assert {path for path, _ in routes} >= ADMINISTRATIVE | REACHED
    reached = set()
    async with Client() as client:
        for path, _ in routes:
            for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
                await client.request(method, path.replace("{", "").replace("}", ""), json={"prompts": ["x"]})
                for request in client.engine.requests:
                    reached.add((request.method, request.path))
                client.engine.requests.clear()
    assert reached == {("POST", path) for path in REACHED}
