"""Labels of tenants."""

from serve_app.telemetry.tenants import TenantLabels


def test_labels_run_out_however_often_the_top_changes() -> None:
    tenants = TenantLabels(3)
    for n in range(100):
        tenants.round({f"tenant-{n}": 2**n})
    names = {tenants.label(f"tenant-{n}") for n in range(100)}
    assert len(names - {"other"}) == 15


def test_a_tenant_that_is_large_late_has_a_label_too() -> None:
    tenants = TenantLabels(2)
    tenants.round({"early": 5, "also": 5})
    for _ in range(10):
        tenants.round({f"small-{n}": 1 for n in range(50)} | {"late": 1_000})
    assert tenants.label("late") == "late"
    assert tenants.label("early") == "early"
    assert tenants.label("small-49") == "other"
    assert TenantLabels(0).label("any") == "other"
