"""What a process counts, as it is exported."""

from __future__ import annotations

from headwater.metrics import Metrics, Totals


def test_counters_for_alerts_begin_at_zero() -> None:
    """An alert on a rise does not see a counter that begins with 1."""
    for kind in ("live", "topic", "query"):
        value = Metrics().registry.get_sample_value(
            "headwater_reconcile_drift_total", {"kind": kind}
        )
        assert value == 0
    drift = {"reason": "drift"}
    assert Metrics().registry.get_sample_value("headwater_resyncs_total", drift) == 0


def test_totals_that_are_counted_elsewhere() -> None:
    metrics = Metrics()
    totals = Totals(metrics.source_changes)

    def value(source: str) -> float | None:
        name = "headwater_source_changes_total"
        return metrics.registry.get_sample_value(name, {"source": source})

    totals.set({"shop": 5, "crm": 0})
    assert (value("shop"), value("crm")) == (5, 0)
    totals.set({"shop": 7, "crm": 1})
    assert (value("shop"), value("crm")) == (7, 1)
    totals.set({"shop": 2})  # another process runs it, which begins at 0
    assert (value("shop"), value("crm")) == (2, None)
