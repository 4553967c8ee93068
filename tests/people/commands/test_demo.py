import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from npu_agent.cli import main as cli
from npu_agent.people import simulator
from tests.golden import golden
from tests.outputs.deviceplugin.helpers import short_directory
from tests.people.commands.tour import GOLDEN, comparable
from tests.processes import DEADLINE, NOBODY, Process, environment, started


def test_tour_is_the_golden_one() -> None:
    """It needs no root, and an agent in a Pod of a cluster is none of it."""
    cluster = {"KUBERNETES_SERVICE_HOST": "192.0.2.1", "KUBERNETES_SERVICE_PORT": "443"}
    cluster["LC_ALL"] = "C.UTF-8"  # as the golden file has it
    nobody = NOBODY if os.geteuid() == 0 and shutil.which("setpriv") else ()
    with short_directory() as work:
        if nobody:
            os.chown(work, 65534, 65534)
        done = subprocess.run(
            [*nobody, sys.executable, "-m", "npu_agent", "demo", "--once"],
            cwd=work,
            capture_output=True,
            encoding="utf-8",
            timeout=DEADLINE,
            env=environment({"PYTHONPATH": str(Path(cli.__file__).parents[2]), **cluster}),
        )
    assert (done.returncode, done.stderr) == (0, "")
    found = comparable(done.stdout)
    assert found == golden(GOLDEN, found)


CLAIMS = 9
"""How many steps come before those on claims, which can do without them."""


@pytest.mark.parametrize(
    ("fault", "skipped", "step", "reason"),
    [
        (
            "session.Session.run, limit = lambda self: asyncio.Event().wait(), 0.5",
            0,
            "1. The agent registers with the kubelet",
            "this did not happen within 0.5 s",
        ),
        (
            "service.requested = refuse",
            0,
            "5. A Pod asks for one NPU",
            "FAILED_PRECONDITION: out of order",
        ),
        (
            "claims.Claims.prepare = refuse_all",
            CLAIMS,
            "2. A Pod claims one NPU, and the agent prepares the claim",
            "NodePrepareResources failed for ResourceClaim train-0: out of order",
        ),
        (
            "allocator.Allocator.prepare = give_all",
            CLAIMS,
            "5. The Pod is deleted by force: the next waits until its container ends",
            "two claims have the same card, or the second was refused",
        ),
    ],
)
def test_step_that_does_not_happen_ends_the_tour_with_exit_1(
    fault: str, skipped: int, step: str, reason: str
) -> None:
    program = f"""
import asyncio, sys
from npu_agent.cli import main as cli
from npu_agent.people.commands import demo
from npu_agent.core.grant import Refusal, RefusalError
from npu_agent.kubelet import allocator
from npu_agent.outputs.deviceplugin import service, session
from npu_agent.outputs.dra import claims

def refuse(*_):
    raise RefusalError(Refusal.UNFIT, "out of order")

async def refuse_all(_, refs):
    return dict.fromkeys((ref.uid for ref in refs), "out of order")

async def give_all(*_):
    pass

limit, steps = demo.DEADLINE, demo.Tour.steps
{fault}
demo.Tour.steps = lambda tour: steps(tour)[{skipped}:]
sys.exit(asyncio.run(demo.run(once=True, deadline=limit)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        encoding="utf-8",
        timeout=DEADLINE,
        env=environment({"LC_ALL": "C.UTF-8"}),
    )
    assert (done.returncode, done.stderr) == (1, "")
    tour, _, log = done.stdout.partition("\nThe end of the agent's log:\n")
    *_, title, said = tour.splitlines()
    assert title == step
    assert said.lstrip().startswith("✘ ")
    assert said.endswith(reason)
    assert re.search(r"Z (debug|info|warning) ", log)


def test_stays_up_until_ctrl_c_and_leaves_nothing_behind() -> None:
    program = """
import sys
from npu_agent.cli import main as cli
from npu_agent.people.commands import demo

demo.Tour.steps = lambda tour: ()
sys.exit(cli.main(["demo"]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as popen:
        process = Process(popen)
        log = process.printed("the agent's log is in ").rpartition(" ")[2]
        directory = Path(log).parent
        typed = process.printed(" info --host-root ")
        shown = subprocess.run(shlex.split(typed), capture_output=True, text=True, timeout=DEADLINE)
        assert "npu1" in shown.stdout
        process.printed("Its log from here on:")
        simulator.apply_fault(directory / "host", "npu0", "dead")
        assert "card=npu0" in process.said("card unhealthy")
        code, _, err = process.end(signal.SIGINT)
    assert code == 0
    assert "Traceback" not in err
    assert not directory.exists()


def test_a_hangup_in_the_middle_of_the_tour() -> None:
    with started("demo") as process:
        log = process.printed("the agent's log is in ").rpartition(" ")[2]
        process.printed("1. The agent registers")
        code, out, err = process.end(signal.SIGHUP)
    assert (code, err) == (0, "")
    assert "All steps passed" not in out
    assert not Path(log).parent.exists()


def test_a_reader_that_goes_away_in_the_middle_is_no_reason_to_complain() -> None:
    """As in `npu-agent demo --once | head -7`."""
    with subprocess.Popen(
        [sys.executable, "-m", "npu_agent", "demo", "--once"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as popen:
        log = Process(popen).printed("the agent's log is in ").rpartition(" ")[2]
        assert popen.stdout
        popen.stdout.close()
        assert popen.stderr
        assert popen.stderr.read() == ""
        assert popen.wait(DEADLINE) == 1
    assert not Path(log).parent.exists()


def test_files_that_cannot_be_written_are_an_error_of_one_line(tmp_path: Path) -> None:
    """As on a full disk: no file may have more than 64 bytes."""
    program = """
import resource, sys
from npu_agent.cli import main as cli

resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
sys.exit(cli.main(["demo", "--once"]))
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=environment({"TMPDIR": str(tmp_path)}),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("npu-agent: error: ")
    assert "File too large" in done.stderr
    assert done.stderr.endswith(
        ": set TMPDIR to a directory with 10 MB to spare, and a short path\n"
    )
    assert list(tmp_path.iterdir()) == []
