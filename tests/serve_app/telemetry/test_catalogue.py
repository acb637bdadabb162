"""The catalogue as a whole: Ray and Prometheus take each metric."""

import re

from serve_app.telemetry import catalogue


def test_names_are_unique_and_counters_end_in_total() -> None:
    names = [metric.name for metric in catalogue.ALL]
    assert len(set(names)) == len(names)
    for metric in catalogue.ALL:
        assert re.fullmatch(r"(saturate|vllm)_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name


def test_histograms_and_they_alone_have_rising_buckets() -> None:
    for metric in catalogue.ALL:
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert sorted(set(metric.buckets)) == list(metric.buckets), metric.name


def test_the_table_has_a_row_for_each_metric() -> None:
    head, rule, *rows = catalogue.table().splitlines()
    assert head.count("|") == rule.count("|") == 5
    found = [row.split("`")[1] for row in rows]
    assert found == [metric.exported for metric in catalogue.ALL]
