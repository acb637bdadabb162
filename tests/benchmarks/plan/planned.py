"""The planning model, with the requests of a run and with random ones."""

from serve_app.simulation.profiles import Profile
from serve_app.tuning.planning import RUNS, Figures, Trials
from serve_app.tuning.service import LoadAnswer
from serve_app.tuning.twin import Fleet, ReplicaSettings, replay
from tests.benchmarks.plan.load import LoadStep, Requests
from tests.benchmarks.plan.loads import Level


def planned(profile: Profile, level: Level, requests: Requests, *, seconds: float, seed: int) -> LoadStep:
    """Return what the model says about the requests that the generator sends with a seed.

    Args:
        profile: The device.
        level: The load.
        requests: Makes the requests.
        seconds: Seconds that count, after those of the warm-up.
        seed: The seed.
    """
    end = level.warm_up_s + seconds
    arrivals = requests.arrivals(level.workload.rate, seed)
    fleet = Fleet(profile, ReplicaSettings.of(profile), 1, level.workload)
    run = replay(fleet, level.workload, arrivals, seconds=end)
    answers = [LoadAnswer(each.sent_at, each.output, each.first_at, each.ended_at) for each in run.requests]
    now = max([end, *(each.ended_at for each in run.requests)])
    return LoadStep.of(level.step, (), answers, (level.warm_up_s, end), began_at=0.0, now=now)


def trial(profile: Profile, level: Level) -> Figures:
    """Return the figures that `saturate plan` has for one replica, from random numbers of its own."""
    return Trials(profile, level.workload, ()).trial(1, ReplicaSettings.of(profile), RUNS).figures
