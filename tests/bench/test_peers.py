"""What is made of the measurements of peers: nothing here is built or run."""

from __future__ import annotations

import json
from pathlib import Path

from bench import peers
from bench.fleet.server import requests


def event(agent: str, verb: str, at: str, uri: str, number: int) -> str:
    return json.dumps(
        {
            "auditID": str(number),
            "user": {"username": "admin"},
            "userAgent": agent,
            "verb": verb,
            "requestReceivedTimestamp": f"1970-01-01T00:{at}.000000Z",
            "requestURI": uri,
        }
    )


def test_requests_of_drivers_alone_count_by_the_times_of_their_watches(tmp_path: Path) -> None:
    """Two watches of 450 s each are 16 requests an hour; a read in a minute is 60."""
    lines = [
        event("driver/v1 (linux)", "watch", "00:01", "/slices?timeoutSeconds=300&watch=true", 1),
        event("driver/v1 (linux)", "watch", "00:02", "/nodes?timeoutSeconds=600", 2),
        event("Python/3.11 aiohttp/3.14", "list", "00:30", "/slices", 3),
        event("kube-apiserver/v1.37.2", "get", "00:31", "/nodes", 4),
        event("driver/v1 (linux)", "get", "00:32", "/nodes/n", 5),
    ]
    log = tmp_path / "audit.log"
    log.write_text("\n".join(lines) + "\n" + lines[0][:40], encoding="utf-8")
    found = requests(log, peers.by_program)
    assert [one.verb for one in found] == ["watch", "watch", "get"]
    assert peers.node_hour(found, since=10.0, seconds=60.0) == "76.0"
    assert peers.node_hour(found, since=33.0, seconds=60.0) == "16.0"
    assert peers.node_hour(found[:1], since=10.0, seconds=60.0) == "12.0"


def test_a_pod_is_ready_by_its_condition() -> None:
    assert not peers.is_ready({"status": {"phase": "Pending"}})
    conditions = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "False"}]
    assert not peers.is_ready({"status": {"conditions": conditions}})
    conditions[1]["status"] = "True"
    assert peers.is_ready({"status": {"conditions": conditions}})


def test_events_are_shown_by_the_median_and_the_longest() -> None:
    assert peers.median([0.5, 0.125, 4.0]) == "0.50 / 4.00 s"
