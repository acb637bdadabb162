"""Row of the dashboard: Are users happy?"""

from k8s.dashboard.panel import Panel, Query, Row
from k8s.dashboard.promql import HERE, quantiles, rate
from serve_app.telemetry import catalogue as c

GOOD = 'outcome="ok", '
COUNTED = 'outcome=~"ok|failed|rejected|expired", '
SHARE_GOOD = f"{rate(c.REQUESTS, 'model', GOOD + HERE)} / {rate(c.REQUESTS, 'model', COUNTED + HERE)}"

ROW = Row(
    "Are users happy?",
    (
        Panel(
            "Requests by outcome",
            "reqps",
            (Query(rate(c.REQUESTS, "model, outcome"), "{{model}} {{outcome}}"),),
            "rejected: 429, the queue is full. expired: 408, its deadline passed. refused: the request "
            "was wrong. cancelled: the client disconnected.",
        ),
        Panel(
            "Share of successful requests",
            "percentunit",
            (Query(SHARE_GOOD, "{{model}}"),),
            "Without requests that were cancelled or refused.",
            1,
        ),
        Panel(
            "Time to first token",
            "s",
            quantiles(c.FIRST_TOKEN.exported, "model", "{{model}}"),
            "Streams, measured at the Ingress.",
        ),
        Panel(
            "Time per output token", "s", quantiles(c.PER_TOKEN.exported, "model", "{{model}}"), "Streams."
        ),
        Panel(
            "Whole request",
            "s",
            quantiles(c.REQUEST_SECONDS.exported, "model, stream", "{{model}} stream {{stream}}"),
        ),
        Panel(
            "Overhead of the path",
            "s",
            quantiles(c.PATH_SECONDS.exported, "model", "{{model}}"),
            "Time of an answered request outside the batcher's queue and the engine.",
        ),
    ),
)
