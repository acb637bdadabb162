"""Prompts of `/generate`."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from jinja2 import TemplateError
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers import get_tokenizer

from serve_app.api.errors import RequestError
from serve_app.engine.tokenizing import TokenizingQueue
from serve_app.engine.vllm.prompts import Prompts
from serve_app.engine.vllm.refusal import RefusedError
from serve_app.settings.models import LLMSettings
from serve_app.settings.sources import DEMO_MODEL
from tests.serve_app.engine.vllm_doubles import CONTEXT


@pytest.fixture
async def prompts() -> AsyncIterator[Prompts]:
    texts = TokenizingQueue(1)
    await texts.start()
    tokenizer = get_tokenizer(LLMSettings(id="demo", source=DEMO_MODEL).path)
    yield Prompts(tokenizer, Renderer(), texts, CONTEXT)
    await texts.stop()


def of_vllm() -> None:
    """Raise, in a module of vLLM's, what a chat template raises."""
    module: dict[str, Any] = {"__name__": "vllm.renderers.hf", "TemplateError": TemplateError}
    exec("def render(): raise TemplateError('roles must alternate')", module)
    module["render"]()


class Renderer:
    """Stands for vLLM's renderer: the text of the last message says what it does."""

    async def render_chat(self, request: Any) -> Any:
        match request.messages[-1]["content"]:
            case "refused":
                raise RefusedError(RequestError(429, "rate_limit_error", "full"))
            case "wrong":
                raise VLLMValidationError("no such role")
            case "unbalanced":
                of_vllm()
            case "broken":
                raise KeyError("inside")
            case "image":
                return None, ({"type": "multimodal"},)
        return None, ({"type": "token", "prompt_token_ids": [1, 2]},)


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def test_prompts_are_tokenized_and_one_that_can_not_fit_is_not(prompts: Prompts) -> None:
    first, second, third = await prompts.tokenize(["1+2", "x" * 100_000, "3"])
    assert isinstance(first, list)
    assert isinstance(third, list)
    assert len(first) == len(third) + 2
    assert isinstance(second, RequestError)
    assert "100000 characters" in second.message


async def test_a_prompt_that_is_no_text_is_an_error_beside_the_others(prompts: Prompts) -> None:
    # As in data sets that were cut between two halves of a character.
    first, second, third = await prompts.tokenize(["1+2", "x\ud83d", "3"])
    assert isinstance(first, list)
    assert isinstance(third, list)
    assert len(first) == len(third) + 2
    assert isinstance(second, RequestError)
    assert (second.status, "surrogates not allowed at character 1" in second.message) == (400, True)


async def test_a_chat_that_can_not_be_rendered_is_an_error_beside_the_others(prompts: Prompts) -> None:
    good, wrong, image = await prompts.render([chat("1+2"), chat("wrong"), chat("image")])
    assert good == [1, 2]
    assert isinstance(wrong, RequestError)
    assert isinstance(image, RequestError)
    assert (wrong.status, wrong.message) == (400, "no such role")
    assert (image.status, "only text" in image.message) == (400, True)


async def test_a_chat_that_the_template_refuses_is_its_caller_s_fault(prompts: Prompts) -> None:
    (error,) = await prompts.render([chat("unbalanced")])
    assert isinstance(error, RequestError)
    assert (error.status, error.message) == (400, "roles must alternate")


async def test_a_fault_while_a_chat_is_rendered_is_not_that_of_the_chat(prompts: Prompts) -> None:
    with pytest.raises(KeyError):
        await prompts.render([chat("broken")])


async def test_a_refusal_while_a_chat_is_rendered_is_that_of_the_whole_list(prompts: Prompts) -> None:
    with pytest.raises(RequestError, match="full"):
        await prompts.render([chat("1+2"), chat("refused")])
