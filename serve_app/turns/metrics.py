"""Metrics of turns, from the rotas of the devices."""

from collections.abc import Mapping

from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from serve_app.turns.rota import Rota


class TurnMetrics:
    """Records the models that are awake, the turns, and the cost of switches.

    Args:
        rotas: The rotas, by group and device.
        meters: Instruments of `catalogue.TURNS`; None: Ray's instruments.
    """

    def __init__(self, rotas: Mapping[tuple[str, str], Rota], meters: Meters | None = None) -> None:
        self._rotas = rotas
        self._meters = meters or Meters(catalogue.TURNS)

    def report(self) -> None:
        """Record the state once. The devices of a group are summed."""
        for group in {group for group, _ in self._rotas}:
            rotas = [rota for (name, _), rota in self._rotas.items() if name == group]
            members = [member.report for rota in rotas for member in rota.members.values()]
            # A gauge keeps its last value, so models whose engines have ended are set to 0.
            for model in {one.model for one in members}.union(*(rota.turns for rota in rotas)):
                awake = sum(one.model == model and one.state in {"awake", "draining"} for one in members)
                self._meters.record(catalogue.AWAKE, awake, model, group)
                turns = sum(rota.turns[model] for rota in rotas)
                self._meters.count(catalogue.TURNS_BEGUN, turns, model, group)
                still_s = sum(rota.still_s[model] for rota in rotas)
                self._meters.count(catalogue.SWITCHING, still_s, model, group)
