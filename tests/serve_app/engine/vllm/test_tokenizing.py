"""Bounds on what vLLM's renderer tokenizes, with the demo model's tokenizer."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.renderers import TokenizeParams
from vllm.renderers.hf import HfRenderer
from vllm.tokenizers import get_tokenizer

from serve_app.engine.admission import AdmissionRequest, AdmissionResult, set_current
from serve_app.engine.tokenizing import SHORT_BYTES, TokenizingQueue
from serve_app.engine.vllm.refusal import RefusedError
from serve_app.engine.vllm.tokenizing import (
    PIECE_CHARS,
    bound_tokenizing,
    exceeds,
    render_short_chats_at_once,
)
from serve_app.settings.models import LLMSettings
from serve_app.settings.sources import DEMO_MODEL

MOST = 10
COUNTS = TokenizeParams(max_total_tokens=None)
TOKENIZER = get_tokenizer(LLMSettings(id="demo", source=DEMO_MODEL).path)
LONGEST = TOKENIZER.max_chars_per_token


class Renderer:
    """Stands for vLLM's renderer.

    Attributes:
        texts: The texts that were tokenized.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._tokenize_prompt_async = self._async_tokenizer_decode = None

    def get_tokenizer(self) -> Any:
        return TOKENIZER

    def _tokenize_prompt(self, prompt: Any, params: TokenizeParams) -> Any:
        self.texts.append(prompt["prompt"])
        return {"prompt_token_ids": TOKENIZER(prompt["prompt"], **params.get_encode_kwargs()).input_ids}

    def _decode(self, token_ids: list[int]) -> str:
        return str(TOKENIZER.decode(token_ids))


@pytest.fixture
async def queue() -> AsyncIterator[TokenizingQueue]:
    queue = TokenizingQueue(10)
    await queue.start()
    yield queue
    await queue.stop()


@pytest.fixture
def renderer(queue: TokenizingQueue) -> Any:
    renderer: Any = Renderer()
    bound_tokenizing(renderer, queue, MOST)
    return renderer


async def test_a_text_within_the_limit_is_tokenized(renderer: Any) -> None:
    tokens = await renderer._tokenize_prompt_async({"prompt": "x" * MOST}, COUNTS)
    assert len(tokens["prompt_token_ids"]) == MOST


async def test_a_text_that_can_not_be_within_the_limit_is_not_tokenized(renderer: Any) -> None:
    with pytest.raises(VLLMValidationError, match=f"{MOST * LONGEST + 1} characters.*max_tokenize_tokens"):
        await renderer._tokenize_prompt_async({"prompt": "x" * (MOST * LONGEST + 1)}, COUNTS)
    assert renderer.texts == []


async def test_a_text_beyond_the_limit_has_no_more_tokens_than_show_it(renderer: Any) -> None:
    with pytest.raises(VLLMValidationError, match="more than 10 tokens"):
        await renderer._tokenize_prompt_async({"prompt": "x" * (MOST + 1)}, COUNTS)


@pytest.mark.parametrize(("characters", "fits"), [(3 * PIECE_CHARS, True), (3 * PIECE_CHARS + 100, False)])
async def test_a_long_text_is_counted_in_pieces_before_it_is_tokenized(
    renderer: Any, characters: int, fits: bool
) -> None:
    # One token for each character.
    params = TokenizeParams(max_total_tokens=3 * PIECE_CHARS)
    if fits:
        tokens = await renderer._tokenize_prompt_async({"prompt": "x" * characters}, params)
        assert len(tokens["prompt_token_ids"]) == characters
    else:
        with pytest.raises(VLLMValidationError, match="context has 196608 tokens"):
            await renderer._tokenize_prompt_async({"prompt": "x" * (characters + PIECE_CHARS)}, params)
        assert renderer.texts == []


@pytest.mark.parametrize(
    ("characters_per_token", "most", "answer", "counted"),
    [
        (1, 4 * PIECE_CHARS, False, 0),
        (4, 2 * PIECE_CHARS, False, 3),
        (4, PIECE_CHARS, False, 4),
        (1, PIECE_CHARS, True, 2),
    ],
    ids=["fewer bytes than tokens", "soon", "at the end", "too many"],
)
def test_a_long_text_is_counted_as_far_as_the_answer_is_open(
    characters_per_token: int, most: int, answer: bool, counted: int
) -> None:
    pieces: list[str] = []

    def tokenize(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        pieces.append(text)
        return {"input_ids": [0] * (len(text) // characters_per_token)}

    assert exceeds(tokenize, "x" * (4 * PIECE_CHARS), most) is answer
    assert len(pieces) == counted


@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_long_text_that_is_truncated_is_cut_before_it_is_tokenized(
    renderer: Any, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    monkeypatch.setattr(TOKENIZER, "truncation_side", side)
    text = "a" * 1000 + "b" * 1000
    params = TokenizeParams(max_total_tokens=8, truncate_prompt_tokens=4)
    await renderer._tokenize_prompt_async({"prompt": text}, params)
    most = 8 * LONGEST
    assert renderer.texts == [text[-most:] if side == "left" else text[:most]]


async def test_token_ids_within_the_limit_are_decoded(renderer: Any) -> None:
    ids = TOKENIZER("1+2=3").input_ids
    assert await renderer._async_tokenizer_decode(ids) == "1+2=3"
    with pytest.raises(VLLMValidationError, match=r"11 token ids.*max_tokenize_tokens"):
        await renderer._async_tokenizer_decode([1] * (MOST + 1))


async def test_a_refusal_of_the_queue_ends_the_request_in_vllms_application(
    renderer: Any, queue: TokenizingQueue
) -> None:
    await queue.stop()
    with pytest.raises(RefusedError):
        await renderer._tokenize_prompt_async({"prompt": "x"}, COUNTS)


async def test_another_vllm_does_not_tokenize_past_the_queue(queue: TokenizingQueue) -> None:
    renderer: Any = SimpleNamespace(_tokenize_prompt=None, _decode=None)
    with pytest.raises(RuntimeError, match="_tokenize_prompt_async"):
        bound_tokenizing(renderer, queue, MOST)


@pytest.mark.parametrize(("size", "rendered"), [(SHORT_BYTES, "1+2user"), (SHORT_BYTES + 1, "in a thread")])
async def test_the_chat_template_of_a_short_request_is_applied_without_a_thread(
    size: int, rendered: str
) -> None:
    async def in_thread(*args: Any, **options: Any) -> str:
        return "in a thread"

    renderer: Any = object.__new__(HfRenderer)
    renderer._apply_chat_template_async = in_thread
    render_short_chats_at_once(renderer)
    set_current(AdmissionRequest(size=size), AdmissionResult())
    template = "{{ messages[0].content }}{{ messages[0].role }}"
    messages = [{"role": "user", "content": "1+2"}]
    found = await renderer._apply_chat_template_async(
        None, TOKENIZER, messages, chat_template=template, tokenize=False
    )
    assert found == rendered


def test_a_renderer_of_another_kind_keeps_its_threads() -> None:
    renderer: Any = SimpleNamespace(_apply_chat_template_async=None)
    render_short_chats_at_once(renderer)
    assert renderer._apply_chat_template_async is None
