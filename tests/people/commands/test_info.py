"""`npu-agent info` on a terminal: what is left on a narrow one, and --watch."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_agent.cli.main import main
from npu_agent.config import MetricsConfig
from npu_agent.people import running, simulator
from npu_agent.people.cards import read_once
from npu_agent.people.commands import view
from npu_agent.people.commands.info import as_reported
from npu_agent.people.report import Core, Report, ReportedCard, ReportedReading
from npu_agent.people.simulator.cards import card
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.inventory.helpers import tree
from tests.kube.helpers import says, serving
from tests.processes import ran, started
from tests.terminal import Terminal, npu_agent
from tests.until import wait_until

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tree(tmp_path / "host", "warboy=2,rngd=1")
    simulator.apply_fault(root, "npu1", "dead")
    return root


DEAD = "the driver reports the card dead (alive says 0)"


def plain(output: str) -> str:
    """Without colours and carriage returns."""
    return re.sub(r"\x1b\[[0-9;]*m", "", output).replace("\r", "")


@pytest.mark.parametrize(
    ("columns", "head"),
    [
        (140, "NPU Name Temp. Power PCI-BDF PCI-DEV Health Load Memory"),
        (100, "NPU Name Temp. Power PCI-BDF PCI-DEV Health Load"),
        (80, "NPU Name Temp. Power PCI-BDF Load Health"),
        (60, "NPU Name Temp. Load Health"),
    ],
)
@pytest.mark.parametrize("command", ["info", "list"])
def test_a_narrow_terminal_keeps_what_matters(
    root: Path, columns: int, head: str, command: str
) -> None:
    with npu_agent(command, "--host-root", root, columns=columns) as process:
        assert process.ended() == 0
    lines = plain(process.output).splitlines()
    assert max(map(len, lines)) <= columns
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    assert " ".join(rows[0]) == head
    assert [row[0] for row in rows[1:] if row[0]] == ["npu1", "npu0", "npu2"]
    # What is longer goes on in the next line.
    health = rows[0].index("Health")
    assert "".join(row[health].replace(" ", "") for row in rows[1:]) == (
        f"unhealthy:{DEAD.replace(' ', '')}healthyhealthy"
    )
    assert "3 cards, 1 unhealthy, 0 in use" in lines


def test_rows_alone_for_scripts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--no-headers", "--host-root", str(root)]) == 0
    printed = capsys.readouterr()
    assert printed.err == "npu-agent: simulated: none of these cards is real\n"
    rows = [line.split() for line in printed.out.splitlines()]
    assert [(row[0], row[6], row[7]) for row in rows] == [
        ("npu0", "0000:01:00.0", "509:0"),
        ("npu1", "0000:02:00.0", "509:1"),
        ("npu2", "0000:81:00.0", "508:2"),
    ]


def test_a_host_without_cards_leads_to_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--host-root", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"no NPUs found below {tmp_path}: npu-agent demo ")


def test_wide_has_everything_on_a_narrow_terminal_too(root: Path) -> None:
    with npu_agent("info", "-o", "wide", "--host-root", root, columns=60) as process:
        assert process.ended() == 0
    rows = [line for line in plain(process.output).splitlines() if line.startswith("|")]
    assert len(rows) == 4
    cells = [cell.strip() for cell in rows[0].split("|")[1:-1]]
    assert cells[:6] == ["NPU", "Name", "Temp.", "Power", "PCI-BDF", "PCI-DEV"]
    assert cells[-5:] == ["UUID", "Serial", "Driver", "Firmware", "NUMA"]
    assert card("warboy", 0).uuid in rows[1]


def test_watch_has_a_screen_of_its_own_with_the_time(root: Path) -> None:
    with npu_agent("info", "-w", "--host-root", root, columns=140) as process:
        process.until("unhealthy: the driver")
        before = len(process.output)
        simulator.apply_fault(root, "npu1", "ok")
        simulator.apply_fault(root, "npu2", "dead")
        process.until("unhealthy: the driver", before)
        process.type("\x03")
        assert process.ended() == 130
    assert process.output.count(ENTER) == process.output.count(LEAVE) == 1
    drawn, _, rest = process.output.partition(LEAVE)
    assert rest == ""
    assert re.search(r"npu-agent info   \d{4}-\d\d-\d\d \d\d:\d\d:\d\d   q or Ctrl-C ends", drawn)
    assert "Traceback" not in process.output


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda process: process.signal(signal.SIGHUP), 128 + signal.SIGHUP),
        (lambda process: process.type("xq"), 0),
    ],
    ids=["SIGHUP", "a key"],
)
def test_watch_leaves_the_terminal_as_it_was_however_it_ends(
    end: Callable[[Terminal], None], code: int, root: Path
) -> None:
    with npu_agent("info", "-w", "--host-root", root) as process:
        process.until("healthy")
        end(process)
        assert process.ended() == code
    assert process.output.endswith(LEAVE)
    assert "q" not in process.output.rpartition("ends")[2].replace(LEAVE, "").rpartition("|")[2]


def test_watch_compares_readings(root: Path) -> None:
    """A card is not just healthy whose error counters rise: one reading does not show that.

    On a terminal that can do nothing, one table is printed after the other.
    """
    with (
        started("simulate", root),
        npu_agent("info", "-w", "--host-root", root, columns=200, env={"TERM": "dumb"}) as process,
    ):
        process.until(r"npu0[^\n]*healthy")
        simulator.apply_fault(root, "npu0", "errors")
        process.until(".{1,200}".join(("healthy;", "npu0", "counts", "new", "errors:")))
        process.type("\x03")
        assert process.ended() == 130
    assert "\x1b[?" not in process.output


def test_a_busy_card_has_a_load(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One reading has none: it is what cores have counted since the reading before."""
    simulator.apply_fault(root, "npu0", "busy")
    with started("simulate", root):
        wait_until(lambda: simulator.cards(root)[0].telemetry.ticks > 0)
        assert main(["info", "-o", "json", "--host-root", str(root)]) == 0
        cards = json.loads(capsys.readouterr().out)
        assert cards[0]["load"] > 50
        assert main(["info", "--no-headers", "--host-root", str(root)]) == 0
        assert re.search(r"npu0 .* healthy +[1-9][0-9]%", capsys.readouterr().out)


def test_watch_on_a_low_terminal_says_what_is_missing(tmp_path: Path) -> None:
    root = tree(tmp_path / "many", "warboy=16")
    with npu_agent("info", "-w", "--host-root", root, lines=12) as process:
        process.until("[.]{3} 13 more lines")
        process.type("\x03")
        assert process.ended() == 130


def test_watch_for_programs_prints_a_document_when_it_differs(root: Path) -> None:
    with started("info", "-w", "-o", "yaml", "--host-root", root) as process:
        assert process.printed("---") == "---\n"
        process.printed("health: unhealthy")
        simulator.apply_fault(root, "npu1", "ok")
        process.printed("---")
        _, out, err = process.end(signal.SIGTERM)
    assert (err, "\x1b" in out) == ("", False)


def test_data_for_programs_leaves_what_cannot_be_read_to_stderr(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (root / "sys/devices").rglob("npu0_mgmt/device_type")
    file.unlink()
    file.mkdir()
    assert main(["info", "-o", "json", "--host-root", str(root)]) == 0
    out, err = capsys.readouterr()
    assert {card["name"] for card in json.loads(out)} == {"npu1", "npu2"}
    assert "npu-agent: not served: " in err
    assert "npu0_mgmt" in err


def test_as_in_the_agents_pod_no_option_is_needed(root: Path, tmp_path: Path) -> None:
    """A config file that is wrong does not keep a person from seeing the cards."""
    file = tmp_path / "config.yaml"
    file.write_text("intervall: 5\n", encoding="utf-8")
    environment = {"NPU_AGENT_HOST_ROOT": str(root), "NPU_AGENT_CONFIG_FILE": str(file)}
    code, out, _ = ran("info", **environment)
    assert (code, out.count("FuriosaAI")) == (0, 3)
    code, _, err = ran("labels", **environment)
    assert (code, f"{file}:1: intervall: unknown key" in err) == (2, True)
    file.write_text("pluginDir: /none/kubelet/device-plugins\n", encoding="utf-8")
    code, _, err = ran("allocations", **environment)
    assert code == 1
    assert "/none/kubelet/pod-resources/kubelet.sock is missing" in err


async def test_the_running_agent_knows_the_load_that_one_read_does_not_show(root: Path) -> None:
    simulator.apply_fault(root, "npu0", "busy")
    snapshot = await read_once(Furiosa(root, simulated=True))
    reading = ReportedReading(cores=tuple(Core(core=core, utilization=42.0) for core in range(2)))
    card = ReportedCard(name="npu0", core_count=2, id=snapshot.cards[0].id, reading=reading)
    shown, _ = as_reported(snapshot, Report(cards=(card,)))
    loads = [[row["load"] for row in view.cards_as_json(of)] for of in (snapshot, shown)]
    assert loads == [[None, loads[0][1], 0.0], [42.0, loads[0][1], 0.0]]


async def test_no_card_is_healthy_that_the_running_agent_reports_as_unhealthy(root: Path) -> None:
    """One read shows neither a card that flaps, nor one that fails its probes."""
    snapshot = await read_once(Furiosa(root, simulated=True))
    ids = [state.id for state in snapshot.cards]
    bad = {"state": "unhealthy", "reason": "\x1b[2J/dev/npu0pe0 missing"}
    cards = [
        {"id": ids[0], "name": "npu0", "core_count": 2, "health": bad},
        {"id": ids[1], "name": "npu1", "core_count": 2, "health": {"state": "healthy"}},
        {"id": "of another host", "name": "npu0", "core_count": 2},
    ]
    problem = {"subject": "card", "text": "npu2 is flapping: 6 changes", "cards": [ids[2], ids[0]]}
    async with serving(says({"cards": cards, "problems": [problem]})) as server:
        address, _ = running.addresses(MetricsConfig(listen=server.url.removeprefix("http://")))
        report = await running.status(address, 10.0)
    assert report
    shown, warnings = as_reported(snapshot, report)
    rows = view.cards_as_json(shown, None, None, warnings)
    assert [(row["health"], row["warnings"]) for row in rows] == [
        ("unhealthy", []),
        ("unhealthy", []),  # as it was read here
        ("healthy", ["npu2 is flapping: 6 changes"]),
    ]
    assert rows[0]["health_reason"] == "?[2J/dev/npu0pe0 missing"
    assert await running.status(address, 10.0) is None, "no process listens there now"


def test_the_slow_card_among_its_siblings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(tmp_path / "host", "rngd=4")
    simulator.apply_fault(root, "npu1", "slow")
    assert main(["--host-root", str(root), "info", "-o", "wide", "--no-headers"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "RNGD" in line]
    assert ["300 W" in row for row in rows] == [True] * 4
    slow = "healthy; npu1 is slow: 1700 MHz, its siblings 2000;"
    assert [slow in row for row in rows] == [False, True, False, False]
    assert "225 of 300 W" in rows[1]
    assert main(["--host-root", str(root), "info", "-o", "json"]) == 0
    cards = json.loads(capsys.readouterr().out)
    assert [card["throttle"] for card in cards] == [[], ["app_power_cap"], [], []]
    assert cards[1]["limits"] == {
        "power": 225.0,
        "default_power": 300.0,
        "clock": 2147,
        "slowdown": 80.0,
    }
