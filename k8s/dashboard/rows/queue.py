"""Row of the dashboard: Which requests wait, and why?"""

from k8s.dashboard.panel import Panel, Query, Row
from k8s.dashboard.promql import SERVE, highest, quantiles, total
from serve_app.telemetry import catalogue as c

ROW = Row(
    "Which requests wait, and why?",
    (
        Panel(
            "Waiting, by tier", "short", (Query(total(c.QUEUE_RECORDS, "model, tier"), "{{model}} {{tier}}"),)
        ),
        Panel(
            "Cost of waiting records",
            "short",
            (
                Query(total(c.QUEUE_COST, "model, tier"), "{{model}} {{tier}}"),
                Query(total(c.CAPACITY, "model"), "{{model}} may run at once"),
            ),
            "Tokens, for a language model.",
        ),
        Panel(
            "Wait in the queue", "s", quantiles(c.WAIT_SECONDS.exported, "model, tier", "{{model}} {{tier}}")
        ),
        Panel(
            "Expected wait of a new record",
            "s",
            (Query(highest(c.WAIT_ESTIMATE, "model"), "{{model}}, longest queue"),),
            "The Retry-After of a 429.",
        ),
        Panel("Run time", "s", quantiles(c.RUN_SECONDS.exported, "model", "{{model}}")),
        Panel(
            "Outside the batcher",
            "short",
            (
                Query(total(c.QUEUE_OUTSIDE, "model"), "{{model}}: callers waiting for the queue"),
                Query(
                    f"sum by (deployment) (ray_serve_deployment_queued_queries{{{SERVE}}})",
                    "{{deployment}}: waiting for a replica",
                ),
            ),
            "Waiting for a replica: there is none yet, or Serve's own limit is reached.",
        ),
        Panel(
            "Batch work beside live traffic",
            "short",
            (Query(total(c.BACKGROUND_RECORDS, "model"), "{{model}}"),),
            "Records of flex that run.",
        ),
    ),
)
