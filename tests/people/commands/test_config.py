"""`npu-agent config check`: what is valid, and still has no effect."""

from pathlib import Path

import pytest

from npu_agent.cli.main import main

NOTE = "note: health.evict has no effect: no card is offered by DRA (allocation.api)"


@pytest.mark.parametrize(
    ("content", "notes"),
    [
        ("health: {evict: true}", [NOTE]),
        ("health: {evict: true}\nallocation: {api: auto}", []),
        ("health: {evict: true}\nresources: [{name: a.b/c, family: rngd, api: dra}]", []),
        ("interval: 5", []),
    ],
)
def test_a_key_without_effect_has_a_note(
    content: str, notes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{content}\n")
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{file}: good", *notes]
