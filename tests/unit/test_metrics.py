"""What a process counts, as it is exported."""

from __future__ import annotations

from headwater.metrics import Metrics


def test_counters_for_alerts_begin_at_zero() -> None:
    """An alert on a rise does not see a counter that begins with 1."""
    for kind in ("live", "topic", "query"):
        value = Metrics().registry.get_sample_value(
            "headwater_reconcile_drift_total", {"kind": kind}
        )
        assert value == 0
    drift = {"reason": "drift"}
    assert Metrics().registry.get_sample_value("headwater_resyncs_total", drift) == 0
