"""A service in virtual time that takes load steps, on the model of `saturate plan`."""

import math

from serve_app.simulation.profiles import Profile
from serve_app.tuning.goals import Goal
from serve_app.tuning.load import LoadLevel, LoadStep, is_clear, is_hopeless
from serve_app.tuning.service import LoadAnswer, ModelFacts
from serve_app.tuning.twin import Fleet, ReplicaSettings, closed_loop, open_loop
from serve_app.tuning.workload import Workload

LOOKS = 50
"""Looks at a step, for whether it holds the goals for certain."""


class VirtualService:
    """Replicas whose load steps take virtual time.

    Attributes:
        settings: Settings of the replicas.
        spent_s: Virtual seconds of all steps so far.
        steps: Steps so far.
        cuts: Whether steps end before their time, once a goal is missed for certain.
    """

    def __init__(
        self, profile: Profile, workload: Workload, goals: tuple[Goal, ...], replicas: int = 1
    ) -> None:
        self.profile = profile
        self.workload = workload
        self.goals = goals
        self.replicas = replicas
        self.settings = ReplicaSettings.of(profile)
        self.spent_s = 0.0
        self.steps = 0
        self.cuts = True

    async def facts(self) -> ModelFacts:
        profile = self.profile
        running = min(self.settings.max_running or profile.max_num_seqs, profile.max_num_seqs)
        return ModelFacts("m", profile.max_model_len, self.replicas, profile.kv_tokens, running, 0, 0)

    async def step(
        self, load: LoadLevel, *, seconds: float, warm_up: float, drain: float, seed: int, early: bool = False
    ) -> LoadStep:
        end = warm_up + seconds
        answers = self._answers(load, end, seed)
        window = warm_up, end
        lone = min(answer.ended_at - answer.sent_at for answer in answers if answer.ended_at)
        expected = load.value * seconds if load.loop == "open" else load.value * seconds / lone

        def hopeless(now: float) -> bool:
            seen = (at(each, now) for each in answers)
            return is_hopeless(seen, self.goals, window, expected, now)

        def clear(now: float) -> bool:
            seen = (at(each, now) for each in answers if each.sent_at <= now)
            return is_clear(load, seen, self.goals, window, now)

        now = end
        counted = [each for each in answers if warm_up <= each.sent_at < end]
        now = min(end + drain, max([end, *(each.ended_at or 0.0 for each in counted)]))
        cut = self.cuts and hopeless(now)
        if cut:
            low = warm_up
            while now - low > 0.25:
                middle = (low + now) / 2
                low, now = (low, middle) if hopeless(middle) else (middle, now)
        elif early:
            looks = (warm_up + number * seconds / LOOKS for number in range(1, LOOKS))
            now = next((look for look in looks if clear(look)), now)
        self.spent_s += now
        self.steps += 1
        seen = [at(each, now) for each in answers if each.sent_at <= now]
        return LoadStep.of(load, self.goals, seen, window, began_at=0.0, now=now, cut=cut)

    def _answers(self, load: LoadLevel, end: float, seed: int) -> list[LoadAnswer]:
        fleet = Fleet(self.profile, self.settings, self.replicas, self.workload)
        if load.loop == "open":
            at_s, number = 0.0, 0
            for draw in self.workload.draws(seed):
                at_s += draw.gap / load.value
                if at_s >= end:
                    break
                number += 1
            run = open_loop(fleet, self.workload, seed, rate=load.value, warm_up=0, counted=max(1, number))
        else:
            count = math.ceil(load.value) * 4
            while True:
                fleet = Fleet(self.profile, self.settings, self.replicas, self.workload)
                run = closed_loop(fleet, self.workload, seed, streams=int(load.value), requests=count)
                if run.requests[-1].sent_at >= end:
                    break
                count = math.ceil(count * min(4.0, 1.1 * end / max(run.requests[-1].sent_at, end / 4)))
        return [LoadAnswer(each.sent_at, each.output, each.first_at, each.ended_at) for each in run.requests]


def at(answer: LoadAnswer, now: float) -> LoadAnswer:
    """Return an answer as it is known at a time."""
    first = answer.first_at if answer.first_at is not None and answer.first_at <= now else None
    ended = answer.ended_at if answer.ended_at is not None and answer.ended_at <= now else None
    return LoadAnswer(answer.sent_at, answer.tokens, first, ended, answer.failed)
