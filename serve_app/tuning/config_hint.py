"""The part of a Serve config that a plan leads to."""

from typing import Any

from serve_app.system.yaml_text import dump
from serve_app.tuning.goals import Goal
from serve_app.tuning.replica import Settings
from serve_app.tuning.trials import Trial

MODEL = "MODEL"
"""Stands for the id of the model."""


def model_settings(settings: Settings, default: Settings) -> dict[str, Any]:
    """Return the settings of a model that differ from the default, as `args.models[]` has them."""
    sections: dict[str, Any] = {}
    if settings.max_num_batched_tokens != default.max_num_batched_tokens:
        sections["engine"] = {"max_num_batched_tokens": settings.max_num_batched_tokens}
    if settings.max_running is not None:
        sections["batcher"] = {"max_running": settings.max_running}
    return sections


def snippet(answer: Trial, default: Settings, goals: tuple[Goal, ...]) -> str:
    """Return the lines to paste into a config.

    Args:
        answer: The plan.
        default: Settings of a config that leaves them out.
        goals: The goals, of which the engine can hold some for live traffic beside `flex` requests.
    """
    sections = model_settings(answer.settings, default)
    lines = []
    if sections:
        lines += ["# in args.models, at the model:", dump(sections).rstrip()]
    if held := batcher_goals(goals):
        text = ", ".join(f"{name}: {value:g}" for name, value in held.items())
        lines.append(f"# beside requests of the tier flex, also: batcher: {{goals: {{{text}}}}}")
    lines += [
        "# in deployments:",
        f'- name: "Engine:{MODEL}"',
        f"  num_replicas: {answer.replicas}",
    ]
    return "\n".join(lines)


def batcher_goals(goals: tuple[Goal, ...]) -> dict[str, float]:
    """Return the goals that `batcher.goals` has, by their names there."""
    found = {goal.name: goal.bound for goal in goals if goal.percentile == 99 and goal.metric != "latency"}
    return {f"{name}_s": found[name] for name in sorted(found, reverse=True)}
