import signal
from pathlib import Path

import pytest

from npu_agent.cli import main as cli
from npu_agent.people.simulator import FAULTS, cards
from tests.processes import started
from tests.until import wait_until


def simulate(*args: str | Path) -> int:
    return cli.main(["simulate", *map(str, args)])


def test_once_makes_a_tree_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    assert simulate(root, "--cards", "warboy=1,rngd=1", "--once") == 0
    said = capsys.readouterr().out
    for word in (
        str(root),
        "npu0",
        "FuriosaAI RNGD",
        f"npu-agent info --host-root {root}",
        f"npu-agent simulate {root} fault npu0 dead",
    ):
        assert word in said
    assert [card.spec.name for card in cards(root)] == ["npu0", "npu1"]
    assert cards(root)[0].telemetry.watts == 1.37


def test_without_cards_a_tree_keeps_those_it_has(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert simulate(root, "--once") == 0
    assert [card.spec.family for card in cards(root)] == ["warboy", "warboy"]
    assert simulate(root, "--cards", "rngd", "--once") == 0
    assert simulate(root, "fault", "npu0", "swap") == 0
    swapped = cards(root)
    assert simulate(root, "--once") == 0
    assert cards(root) == swapped


def test_an_older_driver_is_written_for_the_cards_that_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = ("--cards", "warboy=1,rngd=1", "--driver", "2025.4", "--once")
    assert simulate(tmp_path / "old", *old) == 0
    versions = [card.spec.driver_version for card in cards(tmp_path / "old")]
    assert [version[:6] for version in versions] == ["1.9.2,", "2025.4"]
    entry = tmp_path / "old/sys/class/rngd_mgmt/rngd!npu1mgmt"
    assert (entry / "version").read_text(encoding="utf-8") == f"{versions[1]}\n"
    assert not (entry / "throttle_reason").exists()
    assert simulate(tmp_path / "other", "--cards", "warboy=1", "--driver", "2025.4") == 2
    assert "there are: 2025.4 of rngd" in capsys.readouterr().err


def test_fault_and_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    simulate(root, "--once")
    assert simulate(root, "fault", "npu1", "dead") == 0
    capsys.readouterr()
    assert cards(root)[1].faults == ("dead",)
    assert simulate(root, "status") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("npu0")
    assert lines[0].endswith("ok")
    assert lines[1].endswith("dead")


def test_the_faults_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tmp_path, "fault", "--list") == 0
    listed = capsys.readouterr().out
    with pytest.raises(SystemExit):
        simulate("--help")
    helped = capsys.readouterr().out
    for name, summary in FAULTS.items():
        for text in (listed, helped):
            assert f"  {name} " in text
            assert summary in text


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (["made", "--cards", "wraboy=1", "--once"], 2, "did you mean 'warboy'"),
        (["made", "fault", "npu0", "daed"], 2, "did you mean 'dead'"),
        (["made", "fault", "npu0"], 2, "give a card and a fault"),
        (["other", "fault", "npu0", "dead"], 1, "is not a simulated tree"),
        (["other", "--once"], 1, "is not empty"),
    ],
)
def test_failures_are_said_and_counted(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    code: int,
    word: str,
) -> None:
    simulate(tmp_path / "made", "--once")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/precious").write_text("", encoding="utf-8")
    capsys.readouterr()

    assert simulate(tmp_path / args[0], *args[1:]) == code
    said = capsys.readouterr()
    assert said.err.startswith("npu-agent: error: ")
    assert word in said.err
    assert said.out == ""


def test_the_simulation_lives_until_a_signal_ends_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with started("simulate", root, "--cards", "warboy=1") as process:
        process.printed("Ctrl-C")
        wait_until(lambda: cards(root)[0].telemetry.ticks > 0)
        assert simulate(root, "fault", "npu0", "dead") == 0
        assert process.end(signal.SIGINT) == (0, "stopped; the tree stays as it is\n", "")
    assert cards(root)[0].faults == ("dead",)
