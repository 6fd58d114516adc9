"""What Prometheus reads.

Owns the names of the metrics and the registry, one for each app. What the engine counts is read from its
statistics when somebody asks; what only the server sees is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from denim.engine.facts import EngineFacts
from denim.server.record import RequestRecord

# Seconds; each about 1.8 times the one before: from a token of a small model to a long answer.
TOKEN_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.008, 0.015, 0.025, 0.05, 0.08, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)

KINDS = ("slabs", "pages", "slots")
STATES = ("total", "used", "cached", "free")
QUEUES = ("running", "waiting", "swapped")
PREFIX_GAUGES = ("checkpoints", "bare_ids")  # what stands in the tree now; the other numbers only grow
TIER_GAUGES = ("checkpoints", "used_bytes", "total_bytes")  # the other numbers of a tier only grow


class ServerState(NamedTuple):
    """completions_in_work: taken on and not over. tasks: on the event loop. crashes: of the engine. asleep:
    whether it was put to sleep."""

    completions_in_work: int
    tasks: int
    crashes: int
    asleep: bool


class Metrics:
    """The metrics of one server."""

    def __init__(self, facts: EngineFacts) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._requests = Counter(
            "denim_http_requests", "Requests by path and status.", ("path", "status"), registry=registry
        )
        self._finished = Counter(
            "denim_completions", "Completions by finish reason.", ("finish_reason",), registry=registry
        )
        self._tokens = Counter("denim_request_tokens", "Tokens of requests.", ("kind",), registry=registry)
        self._seconds = Histogram(
            "denim_request_seconds", "Arrival to end.", buckets=REQUEST_BUCKETS, registry=registry
        )
        self.first_token = Histogram(
            "denim_time_to_first_token_seconds",
            "Arrival to first token.",
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "denim_inter_token_seconds", "Between two tokens.", buckets=TOKEN_BUCKETS, registry=registry
        )
        self._generated = Counter(
            "denim_generated_tokens", "Tokens generated, as they come.", registry=registry
        )
        self._engine = _EngineStats(facts)
        registry.register(self._engine)

    def note_generated(self, tokens: int) -> None:
        """Count tokens of a request that still runs."""
        self._generated.inc(tokens)

    @property
    def generated_tokens(self) -> float:
        """Tokens generated so far."""
        return next(iter(self._generated.collect())).samples[0].value

    def note_request(self, record: RequestRecord, path: str, seconds: float) -> None:
        """Count a request that is over. `path` is a route's, so that there are not endlessly many."""
        self._requests.labels(path, str(record.status)).inc()
        if not record.prompts:
            return
        self._seconds.observe(seconds)
        for kind, tokens in (
            ("prompt", record.prompt_tokens),
            ("cached", record.cached_tokens),
            ("completion", record.completion_tokens),
        ):
            self._tokens.labels(kind).inc(tokens)
        for reason, count in record.finish_reasons.items():
            self._finished.labels(reason).inc(count)

    def text(self, stats: Mapping[str, Any] | None, server: ServerState) -> bytes:
        """The metrics in Prometheus' text form, with the engine's `stats` (None: it sleeps or is gone)."""
        self._engine.stats, self._engine.server = stats, server
        return generate_latest(self._registry)


class _EngineStats(Collector):
    """The engine's statistics as metrics."""

    def __init__(self, facts: EngineFacts) -> None:
        self._facts = facts
        self.stats: Mapping[str, Any] | None = None
        self.server = ServerState(0, 0, 0, False)

    def collect(self) -> Iterable[Metric]:
        facts = {name: str(value) for name, value in vars(self._facts).items()}
        yield InfoMetricFamily("denim_engine", "What the engine is; values in force.", value=facts)
        in_work, tasks, crashes, asleep = self.server
        yield GaugeMetricFamily("denim_completions_in_work", "Completions that the server took on.", in_work)
        yield GaugeMetricFamily("denim_server_tasks", "Tasks on the server's event loop.", tasks)
        yield CounterMetricFamily("denim_engine_crashes", "Times that the engine's process died.", crashes)
        yield GaugeMetricFamily("denim_engine_asleep", "1 when it was put to sleep.", float(asleep))
        stats = self.stats
        yield GaugeMetricFamily("denim_engine_up", "1 when the engine answers.", float(stats is not None))
        if stats is None:
            return
        for kind in KINDS:
            family = GaugeMetricFamily(f"denim_{kind}", f"{kind.capitalize()} by state.", labels=("state",))
            for state in STATES:
                family.add_metric((state,), stats[kind][state])
            yield family
        for queue in QUEUES:
            yield GaugeMetricFamily(f"denim_requests_{queue}", f"Completions {queue}.", stats[queue])
        for name in ("steps", "captured_steps", "tokens", "preempted_swap", "preempted_recompute"):
            yield CounterMetricFamily(f"denim_engine_{name}", f"The engine's {name}.", stats[name])
        yield from _prefix_metrics(stats["prefix"])
        yield from _tier_metrics(stats["tiers"])


def _prefix_metrics(prefix: Mapping[str, Any]) -> Iterable[Metric]:
    """The prefix cache's numbers, and the tokens that could not be reused by reason."""
    lost = CounterMetricFamily("denim_prefix_lost_tokens", "Known tokens computed again.", labels=("reason",))
    for reason, tokens in prefix["lost"].items():
        lost.add_metric((reason,), tokens)
    yield lost
    for name, value in prefix.items():
        if isinstance(value, int | float):
            family = GaugeMetricFamily if name in PREFIX_GAUGES else CounterMetricFamily
            yield family(f"denim_prefix_{name}", f"Prefix cache: {name}.", value)


def _tier_metrics(tiers: Mapping[str, Mapping[str, int]]) -> Iterable[Metric]:
    """Each number of the tiers below the device's, by tier; none where there are no tiers."""
    for name in next(iter(tiers.values()), {}):
        now = name in TIER_GAUGES
        make = GaugeMetricFamily if now else CounterMetricFamily
        family = make(f"denim_tier_{name}", f"Prefixes below the device: {name}.", labels=("tier",))
        for tier, numbers in tiers.items():
            family.add_metric((tier,), numbers[name])
        yield family
