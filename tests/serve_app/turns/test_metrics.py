"""Metrics of turns: sums over the devices of a group."""

from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from serve_app.turns.messages import State, TurnDemand, TurnReport
from serve_app.turns.metrics import TurnMetrics
from serve_app.turns.rota import Rota


def meters(values: dict[tuple[str, ...], float]) -> Meters:
    """Return meters that put the last value of each series into `values`."""

    def make(metric: catalogue.Metric):  # type: ignore[no-untyped-def]
        def record(value: float, labels: dict[str, str]) -> None:
            values[metric.name, *labels.values()] = value

        return record

    return Meters(catalogue.TURNS, make)


def test_what_is_awake_the_turns_and_the_cost_of_switches() -> None:
    values: dict[tuple[str, ...], float] = {}
    rotas = {("g", device): Rota(1.0, 10.0) for device in ("0", "1")}
    number = 0

    def tell(device: str, model: str, state: State, at: float) -> None:
        nonlocal number
        number += 1
        work = TurnDemand(state == "asleep", 10)
        rotas["g", device].exchange(TurnReport("g", device, model + device, model, number, state, work), at)

    metrics = TurnMetrics(rotas, meters(values))
    for device in "01":
        tell(device, "a", "awake", 0.0)
    tell("0", "b", "asleep", 1.0)
    tell("0", "a", "draining", 1.0)
    tell("0", "a", "asleep", 2.0)
    tell("0", "b", "waking", 2.0)
    tell("0", "b", "awake", 2.5)
    metrics.report()
    awake, turns = "saturate_turn_awake", "saturate_turns_total"
    still = "saturate_turn_switching_seconds_total"
    assert values == {
        (awake, "a", "g"): 1,
        (awake, "b", "g"): 1,
        (turns, "a", "g"): 2,
        (turns, "b", "g"): 1,
        (still, "b", "g"): 0.5,
    }


def test_a_model_whose_engines_have_ended_is_not_awake() -> None:
    values: dict[tuple[str, ...], float] = {}
    rota = Rota(1.0, 10.0)
    metrics = TurnMetrics({("g", "0"): rota}, meters(values))
    rota.exchange(TurnReport("g", "0", "a#1", "a", 1, "awake"), 0.0)
    metrics.report()
    assert values["saturate_turn_awake", "a", "g"] == 1
    rota.remove("a#1", 1.0)
    metrics.report()
    assert values["saturate_turn_awake", "a", "g"] == 0
