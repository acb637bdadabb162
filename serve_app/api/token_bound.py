"""Bounds on a request's tokens before anything has counted them.

`token_estimate` says what a request probably takes; this says what it takes at most.
"""

from typing import NamedTuple

TEMPLATE_TOKENS = 512
"""Tokens that a chat template adds to a prompt, at most: a system prompt of its own, hints on tools."""

UNKNOWN_CONTEXT = 131_072
"""The context of a model that has told none yet."""


class TokenDemand(NamedTuple):
    """Demand of a request for tokens of an engine.

    Attributes:
        prompt: Bound on the tokens of all its prompts by their bytes: a byte-level tokenizer makes no more
            tokens than there are bytes. None: bytes say nothing, as of an image behind a URL.
        prompts: Its prompts.
        answers: Answers to each prompt.
        output: Most tokens of each answer; None: what is left of the context.
    """

    prompt: int | None
    prompts: int = 1
    answers: int = 1
    output: int | None = None

    def most(self, context: int | None) -> int:
        """Return the most tokens that it can take.

        Args:
            context: Context of the model, in tokens; None: not known.
        """
        prompt, prompts, answers, output = self
        context = context or UNKNOWN_CONTEXT
        if prompt is None or prompt > prompts * context:
            prompt = prompts * context
        if output is None or output > context:
            output = context
        most = prompt + prompts * answers * output if output > 0 else prompt
        # A prompt and its answer share the context; several answers share the prompt.
        return min(most, prompts * (answers or 1) * context)


NOTHING = TokenDemand(0, answers=0, output=0)
"""The demand of a request that runs no model, or a function without tokens."""
