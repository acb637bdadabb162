"""Facts of a request that its body states, before any token of it is counted."""

from dataclasses import dataclass

TEMPLATE_TOKENS = 512
"""Tokens that a chat template adds to a prompt, at most: a system prompt of its own, hints on tools."""

UNKNOWN_CONTEXT = 131_072
"""Context that is assumed for a model whose context is not known yet, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a request.

    Attributes:
        size: Bytes of the body; 0 for a call without one.
        prompt: Bound on the tokens of all prompts together: a byte-level tokenizer makes no more tokens than
            there are bytes. None: bytes say nothing, as with an image behind a URL.
        prompts: Prompts that the engine runs, each by itself.
        answers: Answers to each prompt, which start together.
        output: Most tokens of each answer, as the request or the limit of the service states it; None: what
            is left of the context; 0: the route makes no tokens.
        runs: Whether the route runs the model at all; `/tokenize` does not.
        beam: Whether the answers come from a beam search, whose width is `answers`.
        grammar: Whether the body names a field that may hold a grammar.
    """

    size: int = 0
    prompt: int | None = 0
    prompts: int = 1
    answers: int = 1
    output: int | None = None
    runs: bool = True
    beam: bool = False
    grammar: bool = False

    def most(self, context: int | None) -> int:
        """Return the most tokens that the request can take.

        Args:
            context: Context of the model, in tokens; None: not known.
        """
        if not self.runs:
            return 0
        context = context or UNKNOWN_CONTEXT
        prompt = self.prompts * context
        if self.prompt is not None:
            prompt = min(prompt, self.prompt)
        output = context if self.output is None else min(self.output, context)
        most = prompt + self.prompts * self.answers * max(0, output)
        # A prompt and its answer share the context; several answers share the prompt.
        return min(most, self.prompts * self.answers * context)


NOTHING = Facts(prompt=0, output=0, runs=False)
"""Facts of a request that runs no model."""
