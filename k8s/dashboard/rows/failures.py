"""Row of the dashboard: Is anything failing?"""

from k8s.dashboard.panel import Panel, Query, Row
from k8s.dashboard.promql import HERE, SERVE, highest, rate
from serve_app.telemetry import catalogue as c

ROW = Row(
    "Is anything failing?",
    (
        Panel(
            "Usage ledger",
            "short",
            (
                Query(rate(c.USAGE_ROWS, "model"), "{{model}} rows per second"),
                Query(rate(c.USAGE_DROPPED, "model"), "{{model}} dropped per second"),
                Query(highest(c.USAGE_BEHIND, "model"), "{{model}} seconds behind"),
            ),
            "Empty without `usage.ledger`. Dropped: they could not be written for too long.",
        ),
        Panel(
            "Errors by status",
            "reqps",
            (Query(rate(c.REQUESTS, "model, code", 'outcome!="ok", ' + HERE), "{{model}} {{code}}"),),
            "200: a stream that broke. 0: the client received no status.",
        ),
        Panel(
            "Faults",
            "short",
            (
                Query(
                    f"sum by (deployment) (increase({c.FAULTS.exported}{{{SERVE}}}[$__rate_interval]))",
                    "{{deployment}}",
                ),
            ),
            "Errors of the service itself; the log has their stacks.",
        ),
        Panel(
            "Records without a result",
            "short",
            (
                Query(
                    rate(c.RECORDS_ENDED, "model, outcome", 'outcome!="completed", ' + HERE),
                    "{{model}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Replicas",
            "short",
            (
                Query(
                    f"sum by (deployment) (ray_serve_autoscaling_target_replicas{{{SERVE}}})",
                    "{{deployment}} wanted",
                ),
                Query(
                    f"count by (deployment) (ray_serve_replica_processing_queries{{{SERVE}}})",
                    "{{deployment}} running",
                ),
            ),
        ),
        Panel(
            "Pending nodes", "short", (Query("sum by (NodeType) (autoscaler_pending_nodes)", "{{NodeType}}"),)
        ),
        Panel(
            "Host memory of the nodes",
            "percentunit",
            (Query("max by (ip) (ray_node_mem_used / ray_node_mem_total)", "{{ip}}"),),
            "",
            1,
        ),
        Panel(
            "CPU of the nodes",
            "percent",
            (Query("max by (ip) (ray_node_cpu_utilization)", "{{ip}}"),),
            "",
            100,
        ),
    ),
)
