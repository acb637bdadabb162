"""Row of the dashboard: How do batches go?"""

from k8s.dashboard.panel import Panel, Query, Row
from k8s.dashboard.promql import SERVE
from serve_app.telemetry import catalogue as c

ROW = Row(
    "How do batches go?",
    (
        Panel(
            "Rows of open batches",
            "short",
            (Query(f"sum by (state) ({c.BATCHES_ROWS.exported}{{{SERVE}}})", "{{state}}"),),
            "Rows of /v1/batches that have no result yet.",
        ),
        Panel(
            "Rows per second",
            "short",
            (
                Query(
                    f"sum by (outcome) (rate({c.BATCHES_ROWS_ENDED.exported}{{{SERVE}}}[$__rate_interval]))",
                    "{{outcome}}",
                ),
            ),
        ),
        Panel(
            "Time left and age of the oldest batch",
            "s",
            (
                Query(f"max({c.BATCHES_LEFT.exported}{{{SERVE}}})", "left"),
                Query(f"max({c.BATCHES_OLDEST.exported}{{{SERVE}}})", "oldest"),
            ),
            "Left: at the rate so far; 0 also where the rate is not known yet.",
        ),
        Panel(
            "Open batches",
            "short",
            (
                Query(f"sum by (state) ({c.BATCHES_OPEN.exported}{{{SERVE}}})", "{{state}}"),
                Query(f"sum({c.BATCHES_LATE.exported}{{{SERVE}}})", "will be late"),
            ),
            "Late: they will not end within their completion_window at the rate so far.",
        ),
        Panel("Stored files", "bytes", (Query(f"max({c.BATCHES_BYTES.exported}{{{SERVE}}})", "files"),)),
    ),
)
