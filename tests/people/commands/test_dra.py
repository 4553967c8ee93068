"""`npu-agent dra slices`: what it refuses. What it prints is compared with an agent's slices in
tests/test_agent_dra.py, and given to an API server in tests/e2e/test_dra_slices.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_agent.cli.main import main


@pytest.mark.parametrize(
    ("cards", "config", "code", "error"),
    [
        ("rgnd=8", "", 2, "--template 'rgnd=8': unknown family 'rgnd'; did you mean 'rngd'?"),
        ("rngd=8", "dra: {partition: true}", 2, "config.yaml:1: dra.partition: unknown key"),
        (
            "warboy=1,rngd=1",
            "resources: [{name: a.com/b, family: rngd, api: device-plugin}]",
            1,
            "resources: the api of rngd is device-plugin: set it to dra",
        ),
    ],
)
def test_bad_input(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    cards: str,
    config: str,
    code: int,
    error: str,
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(config, encoding="utf-8")
    assert main(["dra", "slices", "--template", cards, "--config-file", str(file)]) == code
    out, err = capsys.readouterr()
    assert error in err
    assert out == ""
