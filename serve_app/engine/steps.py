"""The time of an engine's step, by its work: a line that is learned while steps run.

A step of a language model takes the sum of a base (the weights are read once), a time for each token of a
prompt, a time for each sequence, and a time for each token of context that is read. `saturate profile`
prints the four times.
"""

import numpy as np

from serve_app.simulation.profiles import StepLine, Work

KNOWN = 16
"""Steps after which a time is predicted."""

SOLVED_EVERY = 16
"""Steps between two solutions."""

MEMORY = 0.998
"""Weight that a step keeps when the next step is seen: some 500 steps count."""

SCALE = np.array([1e-2, 1e-4, 1e-4, 1e-7])
"""Sizes of the four times in seconds, so that the unknowns are about 1 and weigh alike in usual steps."""

FIRM = 1e-3
"""Weight of the last solution, in relation to a step: it decides where the steps of late say nothing."""

AVERAGED = 256
"""Steps over which the mean error is taken."""

SURPRISE = 0.5
"""Relative error from which on a step counts less: a pause of the process, or a first run of a kernel."""


class StepTimes:
    """Predicts the time of a step.

    The line is fitted by least squares to the relative errors of the latest steps.

    Attributes:
        line: The learned line.
        steps: Steps so far.
        error: Mean relative error of the latest predictions, each at most 1.
    """

    def __init__(self) -> None:
        self.line = StepLine(0.0, 0.0, 0.0, 0.0)
        self.steps = 0
        self.error = 0.0
        self._solution = np.array([1.0, 0.5, 0.1, 0.3])
        self._products = np.zeros((4, 4))
        self._sums = np.zeros(4)

    @property
    def known(self) -> bool:
        """Whether enough steps were seen to predict a step."""
        return self.steps >= KNOWN

    def learn(self, work: Work, seconds: float) -> None:
        """Note the time that a step took, in seconds."""
        if seconds <= 0:
            return
        weight = 1.0
        if self.known:
            error = abs(seconds - self.predict(work)) / seconds
            weight = min(1.0, SURPRISE / max(error, 1e-9))
            share = 1 / min(self.steps - KNOWN + 1, AVERAGED)
            self.error += share * (min(error, 1.0) - self.error)
        row = np.array([1.0, *work]) * SCALE / seconds
        self._products = MEMORY * self._products + weight * np.outer(row, row)
        self._sums = MEMORY * self._sums + weight * row
        self.steps += 1
        if self.steps % SOLVED_EVERY == 0:
            self._solve()

    def predict(self, work: Work) -> float:
        """Return the seconds that a step with this work takes."""
        return self.line.seconds(work)

    @property
    def per_prompt_token(self) -> float:
        """Seconds for each token of a prompt."""
        return self.line.prompt_token

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
        self.line = StepLine(*(solution * SCALE).tolist())
