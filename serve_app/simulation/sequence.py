"""Tokens of a simulated sequence: each is a function of the tokens before it, so a prompt has one answer."""

import zlib
from array import array
from collections.abc import Iterable, Sequence


class TokenSequence:
    """A prompt and the tokens that follow it.

    The next token depends on all tokens before it and on nothing else: neither on the other sequences of a
    step nor on where the prompt ends. So an answer that goes on in another engine, with its first tokens as a
    part of the prompt, goes on with the same tokens.

    Args:
        prompt: Token ids of the prompt.
        outputs: Token ids behind it.
    """

    __slots__ = ("_hash", "_outputs", "_prompt_hash", "_prompt_length")

    def __init__(self, prompt: Sequence[int], outputs: Iterable[int] = ()) -> None:
        self._prompt_length = len(prompt)
        self._prompt_hash = zlib.crc32(array("I", prompt))
        self._outputs: list[int] = []
        self._hash = self._prompt_hash
        for token in outputs:
            self._add(token)

    def __len__(self) -> int:
        return self._prompt_length + len(self._outputs)

    def next(self, choices: Sequence[int]) -> int:
        """Add one of `choices` as the next token, and return it."""
        token = choices[zlib.crc32(len(self).to_bytes(4), self._hash) % len(choices)]
        self._add(token)
        return token

    def keep(self, outputs: int) -> None:
        """Forget all but the first `outputs` tokens after the prompt."""
        if outputs < len(self._outputs):
            kept, self._outputs, self._hash = self._outputs[:outputs], [], self._prompt_hash
            for token in kept:
                self._add(token)

    def _add(self, token: int) -> None:
        self._outputs.append(token)
        self._hash = zlib.crc32(array("I", (token,)), self._hash)
