"""Every metric of the gateway. Durations are in plan seconds (wall seconds unless `--speed` says otherwise).

Labels are bounded by the plan: class and group names and replica addresses. A request refused before it had a class
or a group has empty ones; a client that went away counts as status 499.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvantile_router.fleet import Fleet
from kvantile_router.lobby import Lobby

CLIENT_GONE = 499
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TPOT_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0)


class Metrics:
    """One gateway's metrics, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        prefix = "kvantile_router_"
        self.in_flight = Gauge(prefix + "in_flight_requests", "Inference requests being served.", registry=registry)
        self.requests = Counter(
            prefix + "requests_total", "Inference requests that ended.", ["class", "group", "status"], registry=registry
        )
        self.ttft = Histogram(
            prefix + "ttft_seconds", "Arrival to the first byte.", ["class"], registry=registry, buckets=TTFT_BUCKETS_S
        )
        self.tpot = Histogram(
            prefix + "tpot_seconds", "Time per further token.", ["class"], registry=registry, buckets=TPOT_BUCKETS_S
        )
        self.queue = Histogram(
            prefix + "queue_seconds", "Arrival to a place.", ["class"], registry=registry, buckets=TTFT_BUCKETS_S
        )
        self.output_tokens = Counter(
            prefix + "output_tokens_total", "Tokens that answers had.", ["class"], registry=registry
        )
        self.retries = Counter(
            prefix + "retries_total", "Attempts that went to another replica.", ["reason"], registry=registry
        )
        self.reloads = Counter(prefix + "plan_reloads_total", "Plans that replaced another.", registry=registry)
        self.waiting = Gauge(prefix + "waiting_requests", "Requests in the queue.", ["class"], registry=registry)
        self.ready = Gauge(
            prefix + "replica_ready", "1 where health checks pass.", ["group", "replica"], registry=registry
        )
        self.reserved = Gauge(
            prefix + "reserved_tokens", "Prompt and reserved tokens in flight.", ["group", "replica"], registry=registry
        )

    def read(self, fleet: Fleet, lobby: Lobby) -> None:
        """Brings the gauges that mirror other state up to date, before they are shown."""
        for name, count in lobby.waiting.items():
            self.waiting.labels(name).set(count)
        self.ready.clear()
        self.reserved.clear()
        for replica in fleet:
            self.ready.labels(replica.group, replica.url).set(replica.ready)
            self.reserved.labels(replica.group, replica.url).set(replica.tokens)
