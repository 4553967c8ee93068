"""The test alert of docs/monitoring.md, from a real Prometheus through a real Alertmanager."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from bench.process import free_port
from tests.monitoring.fleet import prometheus_of
from tests.monitoring.helpers import PAGE, manifest, needs_promtool, write_rules

EXAMPLE = "examples/test-alert.yaml"
SCRAPED = 'npu_agent_build_info{hostname="node-1"} 1\n'


@asynccontextmanager
async def pager(received: asyncio.Queue[dict[str, Any]]) -> AsyncIterator[int]:
    """A scraped agent's page and a receiver of notifications on one port, which is yielded."""

    async def notified(request: web.Request) -> web.Response:
        for alert in (await request.json())["alerts"]:
            received.put_nowait(alert)
        return web.Response()

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=SCRAPED)

    app = web.Application()
    app.add_routes([web.post("/", notified), web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port := free_port()).start()
        yield port
    finally:
        await runner.cleanup()


@asynccontextmanager
async def alertmanager(directory: Path, pager_port: int) -> AsyncIterator[str]:
    """An Alertmanager that notifies the pager of critical alerts; yields its address."""
    hook = {"url": f"http://127.0.0.1:{pager_port}/"}
    config = {
        "route": {
            "receiver": "none",
            "group_wait": "10ms",
            "routes": [{"receiver": "pager", "matchers": ["severity = critical"]}],
        },
        "receivers": [{"name": "none"}, {"name": "pager", "webhook_configs": [hook]}],
    }
    (directory / "alertmanager.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    with (directory / "alertmanager.log").open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 (it returns at once)
            [
                "prometheus-alertmanager",
                f"--config.file={directory}/alertmanager.yaml",
                f"--storage.path={directory}/alertmanager",
                f"--web.listen-address={address}",
                "--cluster.listen-address=",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield address
    finally:
        process.kill()
        process.wait()


@needs_promtool
async def test_the_test_alert_goes_from_a_scrape_to_the_pager(tmp_path: Path) -> None:
    assert f"kubectl apply -f k8s/{EXAMPLE}" in PAGE
    groups = [{**group, "interval": "200ms"} for group in manifest(EXAMPLE)["spec"]["groups"]]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")
    received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    async with pager(received) as port, alertmanager(tmp_path, port) as address:
        config = {
            "global": {"scrape_interval": "1s"},
            "rule_files": [str(write_rules(tmp_path, interval="200ms")), f"{tmp_path}/test.yaml"],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [address]}]}]},
            "scrape_configs": [
                {
                    "job_name": "npu-agent",
                    "honor_labels": True,
                    "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
                }
            ],
        }
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        async with prometheus_of(tmp_path), asyncio.timeout(60):
            alert = await received.get()
    assert alert["labels"] == {"alertname": "NpuTest", "severity": "critical"}
    assert alert["annotations"]["description"].startswith("Prometheus scrapes 1 agents.")
