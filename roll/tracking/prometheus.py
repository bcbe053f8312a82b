"""`prometheus`: the latest values as gauges, for a Prometheus server that scrapes them from the controller."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from roll.tracking.base import Destination, Tracker
from roll.tracking.names import meaning
from roll.tracking.rollouts import clean

_OTHER = re.compile(r"[^a-zA-Z0-9_]+")
_CLOSE_SECONDS = 5.0
logger = logging.getLogger(__name__)


def gauge_name(metric: str) -> str:
    """Return what a metric is called there: `reward/mean` is `roll_reward_mean`."""
    return "roll_" + _OTHER.sub("_", metric).strip("_")


class PrometheusTracker(Tracker):
    """Serves `/metrics` from threads of its own; the run only puts its values down.

    A metric that isn't measured every step (validation) keeps its last value. Names that become the same, as those of
    two domains may, are told apart by the label `metric`, which has the whole name; the label `run` has `exp_name`.
    """

    def __init__(self, destination: Destination, *, host: str = "127.0.0.1", port: int = 9464) -> None:
        """Listen. Raises `OSError` if the port is taken; 0 takes any that is free."""
        from prometheus_client import CollectorRegistry, start_http_server

        self._run = clean(destination.run_name or "run")
        self._values: Mapping[str, float] = {}
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise OSError(
                f"can't listen on {host}:{port}: {error}; give the tracker another port "
                "(tracker_kwargs.prometheus.port), or 0 for any"
            ) from error
        self.port = self._server.server_port
        """That it listens on."""
        logger.info("Prometheus finds the run's metrics at http://%s:%d/metrics", host, self.port)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # A new mapping each time: scrapes read the old one meanwhile.
        now = {"step": float(step), "last_row_timestamp_seconds": time.time()}
        self._values = {**self._values, **metrics, **now}

    def collect(self) -> Iterator[Any]:
        """Yield the gauges; called for each scrape, by the server's threads."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, Any] = {}
        for metric, value in self._values.items():
            name = gauge_name(metric)
            if name not in families:
                families[name] = GaugeMetricFamily(name, meaning(metric) or clean(metric), labels=("run", "metric"))
            families[name].add_metric((self._run, clean(metric)), value)
        yield from families.values()

    def finish(self, summary: Mapping[str, float]) -> None:
        del summary
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_CLOSE_SECONDS)
