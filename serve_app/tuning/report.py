"""The words and tables of a plan."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.tuning.config_hint import model_settings, snippet
from serve_app.tuning.goals import Goal
from serve_app.tuning.replica import Settings
from serve_app.tuning.search import MOST_LOAD, NoPlanError, Plan
from serve_app.tuning.trials import SHOWN, Figures, Trial, Trials

MEGA = 1e6
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Report:
    """A plan in words.

    Attributes:
        trials: The trials.
        price: Price of a replica's device per hour; None: there is no price.
    """

    trials: Trials
    price: float | None = None

    @property
    def _default(self) -> Settings:
        return Settings.of(self.trials.profile)

    def text(self, plan: Plan) -> str:
        """Return the answer, the table around it, and what to put into a config."""
        answer, goals = plan.answer, tuple(self.trials.goals)
        lines = [self._headline(answer), ""]
        lines += _table(self._heads(), [self._row(row, row is answer) for row in plan.rows])
        lines += ["", *self._notes(plan), "", snippet(answer, self._default, goals)]
        return "\n".join(lines) + "\n"

    def body(self, plan: Plan) -> dict[str, Any]:
        """Return the same for programs."""
        goals = tuple(self.trials.goals)
        return {
            "met": True,
            **self._question(),
            "answer": self._fields(plan.answer),
            "rows": [self._fields(row) for row in plan.rows],
            "least_replicas": plan.least,
            "config": snippet(plan.answer, self._default, goals),
        }

    def no_plan(self, error: NoPlanError) -> dict[str, Any]:
        """Return why there is no plan, and the best that was seen, for programs."""
        return {
            "met": False,
            **self._question(),
            "reason": str(error),
            "misses": [str(goal) for goal in error.misses],
            "best": _seconds(error.best),
            "best_settings": self._fields(error.trial) if error.trial else None,
        }

    def cost(self, replicas: int) -> dict[str, float]:
        """Return the price per hour, and per million tokens: of answers alone, and with their prompts."""
        if self.price is None:
            return {}
        workload = self.trials.workload
        hour = replicas * self.price
        answers = workload.rate * workload.output.expected * HOUR_S / MEGA
        prompts = workload.rate * workload.input.expected * HOUR_S / MEGA
        return {
            "per_hour": hour,
            "per_million_output_tokens": hour / answers,
            "per_million_tokens": hour / (answers + prompts),
        }

    def _headline(self, answer: Trial) -> str:
        profile, workload = self.trials.profile, self.trials.workload
        goals = ", ".join(map(str, self.trials.goals))
        name = "replica" if answer.replicas == 1 else "replicas"
        return (
            f"{answer.replicas} {name} of {profile.name} with {self._settings(answer.settings)}\n"
            f"for {workload.rate:g} requests/s of {workload.input} tokens in and {workload.output} out, "
            f"max_tokens {workload.max_tokens:,}, so that {goals}."
        )

    def _settings(self, settings: Settings) -> str:
        sections = model_settings(settings, self._default)
        named = [
            f"{section}.{name} {value}" for section, each in sections.items() for name, value in each.items()
        ]
        return " and ".join(named) or "default settings"

    def _heads(self) -> list[str]:
        times = [f"{metric.upper()} p{point}" for metric in ("ttft", "tpot") for point in SHOWN]
        extra = [goal.name for goal in self._extra()]
        costs = ["price/h", "per M out", "per M"] if self.price is not None else []
        return ["", "replicas", "settings", *times, *extra, "tok/s", "load", "KV", *costs, "misses"]

    def _extra(self) -> list[Goal]:
        """Return the goals whose figures have no column."""
        return [
            goal for goal in self.trials.goals if goal.metric == "latency" or goal.percentile not in SHOWN
        ]

    def _row(self, row: Trial, chosen: bool) -> list[str]:
        shown = [(metric, point) for metric in ("ttft", "tpot") for point in SHOWN]
        shown += [(goal.metric, goal.percentile) for goal in self._extra()]
        settings = model_settings(row.settings, self._default)
        short = [f"{name} {value}" for section in settings.values() for name, value in section.items()]
        workload = self.trials.workload
        return [
            "▶" if chosen else "",
            str(row.replicas),
            ", ".join(short) or "default",
            *(_time(row.figures[key], row.errors[key]) for key in shown),  # type: ignore[index]
            f"{workload.rate * workload.output.expected:,.0f}",
            f"{row.load:.0%}",
            f"{row.held:.0%}",
            *(f"{value:,.2f}" for value in self.cost(row.replicas).values()),
            " ".join(goal.name for goal in row.misses),
        ]

    def _notes(self, plan: Plan) -> Iterable[str]:
        answer, trials = plan.answer, self.trials
        if plan.least > 1 and plan.least == answer.replicas:
            fewer = plan.least - 1
            their = "its" if fewer == 1 else "their"
            # A load just above the most mustn't look like it.
            yield (
                f"{fewer} can't do the work: {their} load would be {trials.load(fewer, self._default):.1%}, "
                f"and {MOST_LOAD:.0%} is the most of a plan."
            )
        for goal in answer.unsure(trials.goals):
            yield f"{goal.name} is closer to its bound than its error; with one replica more it is safer."
        yield (
            f"±: error of 95% from {answer.requests:,} simulated requests per row. load: requests/s as a "
            "share of the most that the replicas can do."
        )
        yield "KV: mean share of the cache that is reserved."
        if self.price is not None:
            yield "per M out: price of a million tokens of answers; per M: of answers and prompts."

    def _question(self) -> dict[str, Any]:
        workload = self.trials.workload
        return {
            "device": self.trials.profile.name,
            "rate": workload.rate,
            "input": str(workload.input),
            "output": str(workload.output),
            "max_tokens": workload.max_tokens,
            "prefix_share": workload.prefix_share,
            "goals": [str(goal) for goal in self.trials.goals],
        }

    def _fields(self, row: Trial) -> dict[str, Any]:
        workload = self.trials.workload
        return {
            "replicas": row.replicas,
            "settings": model_settings(row.settings, self._default),
            "holds": row.holds,
            "misses": [str(goal) for goal in row.misses],
            "seconds": _seconds(row.figures),
            "errors": _seconds(row.errors),
            "output_tokens_per_s": round(workload.rate * workload.output.expected, 3),
            "load": round(row.load, 4),
            "busy": round(row.busy, 4),
            "kv_reserved": round(row.held, 4),
            "most_running": row.running,
            "requests": row.requests,
            "cost": {name: round(value, 6) for name, value in self.cost(row.replicas).items()} or None,
        }


def _seconds(figures: Figures) -> dict[str, float]:
    return {f"{metric}_p{point}": round(value, 6) for (metric, point), value in figures.items()}


def _time(seconds: float, error: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f}±{error:.2f} s"
    digits = 1 if seconds < 0.1 else 0
    return f"{seconds * 1e3:.{digits}f}±{error * 1e3:.{digits}f} ms"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; columns without content are left out."""
    kept = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    lines = [[line[place] for place in kept] for line in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = {heads.index("settings"), heads.index("misses")}

    def line_of(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, cell, width in zip(kept, cells, widths, strict=True)
        )
        return "  ".join(padded).rstrip()

    return [line_of(lines[0]), "  ".join("─" * width for width in widths), *map(line_of, lines[1:])]
