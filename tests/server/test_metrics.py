"""The engine's statistics as metrics, without a server."""

from __future__ import annotations

from denim.server.metrics import _tier_metrics


def test_tiers_by_name() -> None:
    """Levels as gauges, what only grows as counters; nothing where there are no tiers."""
    tiers = {
        "host": {"checkpoints": 3, "used_bytes": 40, "loaded": 5},
        "disk": {"checkpoints": 7, "used_bytes": 90, "loaded": 1},
    }
    found = {family.name: family for family in _tier_metrics(tiers)}
    assert {name: family.type for name, family in found.items()} == {
        "denim_tier_checkpoints": "gauge",
        "denim_tier_used_bytes": "gauge",
        "denim_tier_loaded": "counter",
    }
    samples = {
        (sample.name, sample.labels["tier"]): sample.value
        for family in found.values()
        for sample in family.samples
    }
    assert samples["denim_tier_checkpoints", "disk"] == 7
    assert samples["denim_tier_loaded_total", "host"] == 5
    assert list(_tier_metrics({})) == []
