"""`npu-agent labels` while a card, or what the machine is called, cannot be read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from npu_agent.cli import main as cli
from npu_agent.outputs.labels.compute import VENDOR_FILE
from npu_agent.outputs.labels.outputs import FILE, parse
from tests.inventory.helpers import tree
from tests.processes import ran

COUNT = "beta.furiosa.ai/npu.count"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with two cards, and with NFD's directory, so that no API server is needed."""
    root = tree(tmp_path / "host", "warboy=2")
    (root / FILE).parent.mkdir(parents=True)
    return root


def labels(root: Path, *arguments: str) -> int:
    return cli.main(["labels", *arguments, "--labels-output=nfd", f"--host-root={root}"])


def there(root: Path) -> dict[str, str]:
    return parse((root / FILE).read_bytes()) if (root / FILE).exists() else {}


def spoil(root: Path) -> Path:
    """What the second card is cannot be read, even by root."""
    (file,) = root.glob("sys/class/npu_mgmt/npu1_mgmt/device_type")
    file.unlink()
    file.mkdir()
    return file


def test_apply_leaves_labels_alone_while_a_card_cannot_be_read(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert labels(root, "apply") == 0
    before = there(root)
    assert before[COUNT] == "2"
    assert capsys.readouterr().err == ""
    file = spoil(root)
    for form in ("table", "json"):
        assert labels(root, "apply", "-o", form) == 1
        assert there(root) == before
        out, err = capsys.readouterr()
        assert out == "", "nothing was applied"
        warning, error = err.splitlines()
        assert "npu1_mgmt" in warning
        assert "stay as they are" in warning
        assert error.startswith("npu-agent: error: not applied: 1 of our labels would change")
    # What would change nothing is no failure.
    (root / FILE).write_text(
        (root / FILE).read_text(encoding="utf-8").replace(f"{COUNT}=2", f"{COUNT}=1"),
        encoding="utf-8",
    )
    assert labels(root, "apply") == 0
    assert f"{COUNT}=1" in capsys.readouterr().out
    file.rmdir()
    file.write_text("Warboy\n", encoding="utf-8")
    assert labels(root, "apply") == 0
    assert there(root) == before


def test_apply_gives_a_new_node_the_labels_of_the_other_cards(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(root)
    assert labels(root, "apply", "-o", "json") == 0
    out, err = capsys.readouterr()
    assert there(root)[COUNT] == json.loads(out)[COUNT] == "1"
    assert "npu1_mgmt" in err


def test_show_says_that_it_may_not_be_all(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(root)
    assert labels(root, "show") == 0
    out, err = capsys.readouterr()
    assert COUNT in out
    assert "these may not be all: an entry that may be a card cannot be read: " in err


def test_a_machine_whose_firmware_hangs_costs_its_labels_only(root: Path) -> None:
    file = root / VENDOR_FILE.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file)  # whoever opens it waits for a writer
    code, out, _ = ran("labels", "apply", "--labels-output=nfd", "--host-root", root)
    assert code == 0
    assert there(root)[COUNT] == "2"
    assert "machine.vendor" not in out
