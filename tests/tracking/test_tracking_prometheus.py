"""`track_with: prometheus`: what a scrape finds, and what happens around it."""

from __future__ import annotations

import math
import socket
import urllib.request

import pytest

from roll.tracking.base import Destination, TrackingError
from roll.tracking.names import meaning
from roll.tracking.tracker_registry import build_trackers

parser = pytest.importorskip("prometheus_client.parser", reason="needs the package prometheus_client")

from roll.tracking.prometheus import PrometheusTracker, gauge_name  # noqa: E402 - after the check for the package


def scraped(port: int) -> dict[tuple[str, str, str], float]:
    """What a Prometheus server would store: (gauge, run, metric) -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(parser.text_string_to_metric_families(answer.read().decode()))
    assert all(family.type == "gauge" for family in families)
    return {(s.name, s.labels["run"], s.labels["metric"]): s.value for family in families for s in family.samples}


def test_a_scrape_finds_the_latest_value_of_each_metric_until_the_run_ends(tmp_path):
    tracker = PrometheusTracker(Destination(tmp_path, None, 'a "run"'), port=0)
    assert scraped(tracker.port) == {}
    tracker.log(1, {"reward/mean": 0.25, "val/accuracy": 0.5})
    tracker.log(2, {"reward/mean": 0.75, "actor/loss": math.nan})
    found = scraped(tracker.port)
    assert found["roll_reward_mean", 'a "run"', "reward/mean"] == 0.75
    assert found["roll_val_accuracy", 'a "run"', "val/accuracy"] == 0.5, "the last validation's"
    assert math.isnan(found["roll_actor_loss", 'a "run"', "actor/loss"])
    assert found["roll_step", 'a "run"', "step"] == 2
    assert found["roll_last_row_timestamp_seconds", 'a "run"', "last_row_timestamp_seconds"] > 1.7e9
    tracker.finish({})
    with pytest.raises(OSError, match="refused"):
        scraped(tracker.port)


def test_metrics_whose_names_become_the_same_are_told_apart(tmp_path):
    tracker = PrometheusTracker(Destination(tmp_path, None, "run"), port=0)
    tracker.log(1, {"reward/a_b/mean": 1.0, "reward/a.b/mean": 2.0})
    found = scraped(tracker.port)
    tracker.finish({})
    assert gauge_name("reward/a.b/mean") == gauge_name("reward/a_b/mean") == "roll_reward_a_b_mean"
    assert found["roll_reward_a_b_mean", "run", "reward/a_b/mean"] == 1.0
    assert found["roll_reward_a_b_mean", "run", "reward/a.b/mean"] == 2.0


def test_it_listens_on_this_machine_alone_and_has_help_from_the_table_of_metrics(tmp_path):
    tracker = PrometheusTracker(Destination(tmp_path, None, "run"), port=0)
    tracker.log(1, {"actor/entropy": 1.5})
    assert tracker._server.server_address[0] == "127.0.0.1"
    with urllib.request.urlopen(f"http://127.0.0.1:{tracker.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    tracker.finish({})
    assert "# HELP roll_actor_entropy Entropy, estimated from the sampled tokens [nats]" in text
    assert meaning("nothing/like/it") == ""


def test_a_port_that_is_taken_ends_the_start_with_what_to_do(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TrackingError, match=rf"127.0.0.1:{port}.*tracker_kwargs.prometheus.port"):
            build_trackers(["prometheus"], {"prometheus": {"port": port}}, tmp_path, None, run_name="run")


def test_half_a_pair_of_surrogates_in_a_name_ends_no_scrape(tmp_path):
    tracker = PrometheusTracker(Destination(tmp_path, None, "run\udcff"), port=0)
    tracker.log(1, {"a/\ud800": 1.0})
    found = scraped(tracker.port)
    tracker.finish({})
    assert found["roll_a", "run\\udcff", "a/\\ud800"] == 1.0
