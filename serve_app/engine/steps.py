"""The time of an engine's step, by its work: a line that is learned while steps run.

A step of a language model takes the sum of a base (the weights are read once), a time for each token of a
prompt, a time for each sequence, and a time for each token of context that is read. `saturate profile`
measures the same four numbers.
"""

from typing import NamedTuple

import numpy as np

KNOWN = 16
"""Steps after which a time is predicted."""

SOLVED_EVERY = 16
"""Steps between two solutions."""

MEMORY = 0.998
"""Weight that a step keeps when the next one is seen: some 500 steps count."""

SCALE = np.array([1e-2, 1e-4, 1e-4, 1e-7])
"""Sizes of the four times in seconds, so that the unknowns are about 1 and weigh alike in usual steps."""

FIRM = 1e-3
"""Weight of the last solution, in relation to a step: it decides where the steps of late say nothing."""

SURPRISE = 0.5
"""Relative error from which on a step counts less: a pause of the process, or a first run of a kernel."""


class Work(NamedTuple):
    """The work of a step.

    Attributes:
        prompt_tokens: Tokens of prompts.
        sequences: Sequences.
        context: Tokens of context that are read, of all sequences together.
    """

    prompt_tokens: int
    sequences: int
    context: int


class StepTimes:
    """Predicts the time of a step.

    The line is fitted by least squares to the relative errors of the latest steps.

    Attributes:
        seconds: The four times in seconds: base, per token of a prompt, per sequence, per token of context.
    """

    def __init__(self) -> None:
        self.seconds: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
        self._solution = np.array([1.0, 0.5, 0.1, 0.3])
        self._products = np.zeros((4, 4))
        self._sums = np.zeros(4)
        self._seen = 0

    @property
    def known(self) -> bool:
        """Whether enough steps were seen to predict others."""
        return self._seen >= KNOWN

    def learn(self, work: Work, seconds: float) -> None:
        """Take in the time that a step took, in seconds."""
        if seconds <= 0:
            return
        weight = 1.0
        if self.known:
            error = abs(seconds - self.predict(work)) / seconds
            weight = min(1.0, SURPRISE / max(error, 1e-9))
        row = np.array([1.0, *work]) * SCALE / seconds
        self._products = MEMORY * self._products + weight * np.outer(row, row)
        self._sums = MEMORY * self._sums + weight * row
        self._seen += 1
        if self._seen % SOLVED_EVERY == 0:
            self._solve()

    def predict(self, work: Work) -> float:
        """Return the seconds that a step with this work takes."""
        base, prompt, sequence, context = self.seconds
        return base + prompt * work.prompt_tokens + sequence * work.sequences + context * work.context

    @property
    def per_prompt_token(self) -> float:
        """Seconds for each token of a prompt."""
        return self.seconds[1]

    def prompt_tokens(self, seconds: float, work: Work) -> int:
        """Return the tokens of prompts that fit into a step of this length beside other work."""
        return int((seconds - self.predict(work)) / max(self.per_prompt_token, 1e-9))

    def _solve(self) -> None:
        products, sums = self._products + FIRM * np.eye(4), self._sums + FIRM * self._solution
        free = np.ones(4, dtype=bool)
        while True:
            solution = np.zeros(4)
            solution[free] = np.linalg.solve(products[np.ix_(free, free)], sums[free])
            if solution.min() >= 0:
                break
            # A time is never negative: the most negative one is 0, and the rest is solved again.
            free[solution.argmin()] = False
        self._solution = solution
        base, prompt, sequence, context = (solution * SCALE).tolist()
        self.seconds = base, prompt, sequence, context
