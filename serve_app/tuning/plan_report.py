"""A plan in words and for programs, with the lines for a config."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from serve_app.system.tables import duration, text_table
from serve_app.system.yaml_text import dump
from serve_app.tuning.fleet import ReplicaSettings
from serve_app.tuning.goals import Goal, batcher_goals
from serve_app.tuning.planning import MOST_LOAD, RUNS, SHOWN, Figures, NoPlanError, Plan, Trial, Trials

MEGA = 1e6
HOUR_S = 3600.0

MODEL = "MODEL"
"""Stands for the id of the model."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan in words.

    Attributes:
        trials: The trials.
        price: Price of a replica's device per hour; None: there is no price.
    """

    trials: Trials
    price: float | None = None

    def text(self, plan: Plan) -> str:
        """Return the answer, the table around the answer, and the lines for a config."""
        answer = plan.answer
        table = text_table(
            self._heads(), [self._row(row, row is answer) for row in plan.rows], left=self._left(), rule=True
        )
        lines = [*self._headline(answer), "", *table, "", *self._notes(plan), "", self.snippet(answer)]
        return "\n".join(lines) + "\n"

    def body(self, plan: Plan) -> dict[str, Any]:
        """Return the plan for programs."""
        return {
            "met": True,
            **self._question(),
            "answer": self._fields(plan.answer),
            "rows": [self._fields(row) for row in plan.rows],
            "least_replicas": plan.least,
            "config": self.snippet(plan.answer),
        }

    def no_plan(self, error: NoPlanError) -> dict[str, Any]:
        """Return why there is no plan, with the best figures, for programs."""
        return {
            "met": False,
            **self._question(),
            "reason": str(error),
            "misses": [str(goal) for goal in error.misses],
            "best": _seconds(error.best),
            "best_settings": self._fields(error.trial) if error.trial else None,
        }

    def cost(self, row: Trial) -> dict[str, float]:
        """Return the price per hour, per million tokens of answers, and per million of all tokens.

        Tokens of rows count, too.
        """
        if self.price is None:
            return {}
        workload = self.trials.workload
        hour = row.replicas * self.price
        answers = workload.rate * workload.output.expected + row.row_tokens_per_s
        prompts = workload.rate * workload.input.expected
        if workload.batch is not None:
            share = row.row_tokens_per_s / workload.batch.output.expected
            prompts += share * workload.batch.input.expected
        return {
            "per_hour": hour,
            "per_million_output_tokens": hour / (answers * HOUR_S / MEGA),
            "per_million_tokens": hour / ((answers + prompts) * HOUR_S / MEGA),
        }

    def snippet(self, answer: Trial) -> str:
        """Return the lines to put into a config."""
        sections, held = self._sections(answer.settings), batcher_goals(self.trials.goals)
        workload = self.trials.workload
        batch = workload.batch is not None
        if batch:
            bounds = {"ttft_p99_s": workload.goals.ttft_s, "tpot_p99_s": workload.goals.tpot_s}
            if known := {name: round(each, 6) for name, each in bounds.items() if each < math.inf}:
                sections.setdefault("batcher", {})["goals"] = known
        lines = []
        if sections:
            lines += ["# in args.models, at the model:", dump(sections).rstrip()]
        if held and not batch:
            text = ", ".join(f"{name}: {value:g}" for name, value in held.items())
            lines.append(f"# beside requests of the tier flex, also: batcher: {{goals: {{{text}}}}}")
        deployment = f'- name: "Engine:{MODEL}"\n  num_replicas: {answer.replicas}'
        return "\n".join([*lines, "# in deployments:", deployment])

    def _sections(self, settings: ReplicaSettings) -> dict[str, Any]:
        """Return the settings of a model that differ from the default, as `args.models[]` has them."""
        sections: dict[str, Any] = {}
        if settings.max_num_batched_tokens != self.trials.profile.max_num_batched_tokens:
            sections["engine"] = {"max_num_batched_tokens": settings.max_num_batched_tokens}
        if settings.overcommit:
            sections["batcher"] = {"policy": "max_utilization"}
        return sections

    def _headline(self, answer: Trial) -> Iterable[str]:
        profile, workload = self.trials.profile, self.trials.workload
        sections = self._sections(answer.settings)
        named = [f"{name}.{key} {value}" for name, each in sections.items() for key, value in each.items()]
        yield (
            f"{answer.replicas} replica{'s' if answer.replicas != 1 else ''} of {profile.name} with "
            f"{' and '.join(named) or 'default settings'}"
        )
        batch, goals = workload.batch, ", ".join(map(str, self.trials.goals))
        end = "," if batch is not None else f", so that {goals}."
        yield (
            f"for {workload.rate:g} requests/s of {workload.input} tokens in and {workload.output} out, "
            f"max_tokens {workload.max_tokens:,}{end}"
        )
        if batch is not None:
            yield (
                f"beside a batch of {batch.input} in and {batch.output} out, so that {goals}. The batch has "
                f"{answer.row_tokens_per_s:,.0f} tokens/s."
            )

    def _heads(self) -> list[str]:
        times = [f"{metric.upper()} p{point}" for metric in ("ttft", "tpot") for point in SHOWN]
        extra = [goal.name for goal in self._extra()]
        costs = ["price/h", "per M out", "per M"] if self.price is not None else []
        return ["", "replicas", "settings", *times, *extra, "tok/s", "batch", "load", "KV", *costs, "misses"]

    def _left(self) -> set[int]:
        heads = self._heads()
        return {heads.index("settings"), heads.index("misses")}

    def _extra(self) -> list[Goal]:
        """Return the goals whose figures have no column."""
        return [
            goal for goal in self.trials.goals if goal.metric == "latency" or goal.percentile not in SHOWN
        ]

    def _row(self, row: Trial, chosen: bool) -> list[str]:
        keys = [(metric, point) for metric in ("ttft", "tpot") for point in SHOWN]
        keys += [goal.key for goal in self._extra()]
        sections = self._sections(row.settings)
        short = [f"{name} {value}" for section in sections.values() for name, value in section.items()]
        workload = self.trials.workload
        misses = [goal.name for goal in row.misses] + (["batch"] if row.short_of_rows else [])
        return [
            "▶" if chosen else "",
            str(row.replicas),
            ", ".join(short) or "default",
            *(duration(row.figures[key], row.errors[key] or None) for key in keys),  # type: ignore[index]
            f"{workload.rate * workload.output.expected:,.0f}",
            f"{row.row_tokens_per_s:,.0f}" if workload.batch is not None else "",
            f"{row.load:.0%}",
            f"{row.held:.0%}",
            *(f"{value:,.2f}" for value in self.cost(row).values()),
            " ".join(misses),
        ]

    def _notes(self, plan: Plan) -> Iterable[str]:
        answer, trials = plan.answer, self.trials
        if trials.profile.source:
            yield f"{trials.profile.name}: {trials.profile.source}."
        if plan.least > 1 and plan.least == answer.replicas:
            fewer = plan.least - 1
            their = "its" if fewer == 1 else "their"
            # A load just above the limit must differ from the limit in print.
            load = trials.load(fewer, ReplicaSettings.of(trials.profile))
            yield (
                f"{fewer} can't do the work: {their} load would be {load:.1%}, and {MOST_LOAD:.0%} is the "
                "most of a plan."
            )
        for goal in answer.unsure(trials.goals):
            yield f"{goal.name} is closer to its bound than its error; with one replica more it is safer."
        yield (
            f"±: error of 95% from {answer.requests:,} simulated requests in {RUNS} runs; other rows are "
            "from one run. load: requests/s as a share of the most that the replicas can do."
        )
        yield "KV: mean share of the cache that is reserved."
        if trials.workload.batch is not None:
            bound_s = min(trials.workload.goals.tpot_s, trials.workload.goals.ttft_s / 3)
            steps = f"; a step with rows takes {bound_s * 1e3:.0f} ms at most" if bound_s < math.inf else ""
            yield f"batch: tokens/s of its answers{steps}."
        if self.price is not None:
            yield "per M out: price of a million tokens of answers; per M: of answers and prompts."

    def _question(self) -> dict[str, Any]:
        workload = self.trials.workload
        batch = workload.batch
        return {
            "device": self.trials.profile.name,
            "rate": workload.rate,
            "input": str(workload.input),
            "output": str(workload.output),
            "max_tokens": workload.max_tokens,
            "prefix_share": workload.prefix_share,
            "batch": None if batch is None else f"{batch.input}/{batch.output}",
            "goals": [str(goal) for goal in self.trials.goals],
        }

    def _fields(self, row: Trial) -> dict[str, Any]:
        workload = self.trials.workload
        return {
            "replicas": row.replicas,
            "settings": self._sections(row.settings),
            "holds": row.holds,
            "misses": [str(goal) for goal in row.misses],
            "seconds": _seconds(row.figures),
            "errors": _seconds(row.errors),
            "output_tokens_per_s": round(workload.rate * workload.output.expected, 3),
            "batch_tokens_per_s": round(row.row_tokens_per_s, 3),
            "load": round(row.load, 4),
            "busy": round(row.busy, 4),
            "kv_reserved": round(row.held, 4),
            "most_running": row.running,
            "requests": row.requests,
            "cost": {name: round(value, 6) for name, value in self.cost(row).items()} or None,
        }


def _seconds(figures: Figures) -> dict[str, float]:
    return {f"{metric}_p{point}": round(value, 6) for (metric, point), value in figures.items()}
