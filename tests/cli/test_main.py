"""The command line, run as a user runs it."""

import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from npu_agent import __version__
from npu_agent.cli import main as cli
from npu_agent.core.ledger import Assignment
from npu_agent.kubelet import podresources as assignments
from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import v1 as wire
from npu_agent.people.commands import version
from npu_agent.people.simulator.cards import card
from tests.inventory.helpers import tree
from tests.kubelet.test_podresources import ASSIGNED, HELD, NPU, PodResources, pod
from tests.outputs.deviceplugin.helpers import short_directory
from tests.outputs.helpers import DRIVER
from tests.processes import DEADLINE, environment, started

CARD, RNGD = card("warboy", 0), card("rngd", 1)
WHOLE = f"npu-{CARD.uuid.lower()}"
"""What a DRA pool calls all of a card."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tree(tmp_path / "host", "warboy=1,rngd=1")


@pytest.fixture
def plugin_dir() -> Iterator[Path]:
    with short_directory() as directory:
        (directory / "pod-resources").mkdir()
        yield directory / "device-plugins"


def called(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Calls `main` in this process: exit code, stdout, stderr."""
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as end:  # argparse
        code = end.code if isinstance(end.code, int) else 1
    return (code, *capsys.readouterr())


Called = tuple[int, str, str]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rum",), "rum: no such command: did you mean run?"),
        (("--host-root",), "--host-root: expected one argument; see `npu-agent --help`"),
        (("--hots-root", "/", "info"), "--hots-root: no such option: did you mean --host-root?"),
        (("info", "--format", "xml"), "must be table, wide, json or yaml, not xml; see `npu-agent"),
        (("info", "-o", "jsno"), "not jsno: did you mean json?"),
        (("info", "-x"), "unrecognized arguments: -x; see `npu-agent info --help`"),
        (("info", "--wat"), "--wat: no such option: did you mean --watch?"),
        (("run", "--default", "Single"), "--default: no such option: did you mean --default-pe?"),
        (("labels", "aply"), "action: must be show, apply or clear, not aply: did you"),
        (("verify", "--expect", "two"), "--expect: invalid int value: 'two'; see"),
        (
            ("run", "--no-kubelet"),
            "--no-kubelet: removed: run `npu-agent cdi generate`, again after each change of cards",
        ),
        (
            ("cdi", "watch"),
            "cdi watch: removed: run `npu-agent cdi generate`, again after each change of cards",
        ),
        (("config", "chekc"), "chekc: no such command: did you mean check?"),
        (("config", "check"), "required: FILE"),
        (("simulate", "/tmp", "falt", "npu0", "dead"), "did you mean fault?"),
        (("info", "--log-level", "loud"), "--log-level: must be debug, error, info or warning"),
        (("info", "--host-root", "/missing"), "--host-root: /missing: No such file or directory"),
        (("run", "--default-pe", "Fusoin"), "must be Fusion or Single, not Fusoin"),
        (("run", "--config-file", "/missing.yaml"), "/missing.yaml"),
    ],
)
def test_wrong_use_is_exit_2_with_the_reason(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    code, out, err = called(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    (line,) = err.splitlines()
    assert line.startswith("npu-agent: error: ")


def test_a_bad_npu_agent_host_root_fails_only_commands_that_read_the_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_AGENT_HOST_ROOT", "/missing")
    code, _, err = called(capsys, "info")
    assert code == 2
    assert err.startswith("npu-agent: error: NPU_AGENT_HOST_ROOT: /missing: No such file or dir")
    for command in ("version", "completion bash", "config show"):
        assert called(capsys, *command.split())[0] == 0


def test_host_root_is_no_key_and_goes_with_a_config_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("interval: 5\n", encoding="utf-8")
    code, out, _ = called(capsys, "config", "show", "--host-root", tmp_path, "--config-file", file)
    assert code == 0
    assert "interval: 5 " in out
    assert str(file) in out


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "commit_of", lambda _: "0123abc")
    assert called(capsys, "--version") == (0, f"npu-agent {__version__}\n", "")
    assert called(capsys, "version") == (0, f"npu-agent {__version__} (commit 0123abc)\n", "")
    found = {"version": __version__, "commit": "0123abc", "python": platform.python_version()}
    _, out, _ = called(capsys, "version", "-o", "yaml")
    assert yaml.safe_load(out) == found
    _, out, _ = called(capsys, "version", "--format=json")
    assert json.loads(out) == found


def test_the_commit_is_the_builds_or_the_checkouts_or_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "npu_agent"
    package.mkdir()
    assert version.commit_of(package) is None
    git = ("git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=n@example.com")
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert version.commit_of(package) == head.strip()
    monkeypatch.setenv("PATH", "")
    assert version.commit_of(package) is None
    (package / "commit").write_text("0123abc\n", encoding="utf-8")
    assert version.commit_of(package) == "0123abc"
    (package / "commit").write_bytes(b"\xff")
    assert version.commit_of(package) is None


def test_info_names_the_pods_that_hold_a_card(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(*_: object) -> tuple[Assignment, ...]:
        return (Assignment("ml", "train", "main", NPU, f"{CARD.uuid}_cores_0"),)

    monkeypatch.setattr(assignments, "fetch", fetch)
    _, out, _ = called(capsys, "info", "--host-root", root)
    rows = {row.split("|")[1].strip(): row for row in out.splitlines() if "|" in row}
    assert rows["NPU"].rstrip(" |").endswith("Pod")
    assert rows["npu0"].rstrip(" |").endswith("ml/train (0)")
    assert rows["npu1"].rstrip(" |").endswith("-")
    _, out, _ = called(capsys, "info", "--host-root", root, "-o", "json")
    held = {"namespace": "ml", "pod": "train", "cores": "0"}
    assert [one["pods"] for one in json.loads(out)] == [[held], []]


def test_common_options_go_before_and_after_the_command(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    options = ("--host-root", root, "--log-level", "debug", "--log-format", "json")
    for arguments in ((*options, "info"), ("info", *options)):
        code, out, err = called(capsys, *arguments)
        assert code == 0
        assert "npu0" in out
        lines = [json.loads(line) for line in err.splitlines()]
        assert {line["message"] for line in lines} >= {"card added"}


def test_allocations_by_device_and_by_claim(
    capsys: pytest.CaptureFixture[str], plugin_dir: Path, root: Path
) -> None:
    held = pod("ml", "train", main={NPU: ["UNKNOWN", CARD.uuid]})
    held += pod("default", "infer", main={NPU: [f"{RNGD.uuid}_cores_0-3"]})
    claims = [
        wire.DynamicResource(
            claim_name=name,
            claim_namespace="ml",
            claim_resources=[
                wire.ClaimResource(driver_name=driver, pool_name="node-1", device_name=device)
            ],
        )
        for name, driver, device in (("a", DRIVER, "npu-b"), ("b", DRIVER, WHOLE), ("c", "x", "y"))
    ]
    claimed = pod("ml", "claims", main=claims)

    async def ask(lists: bytes, form: str) -> str:
        server = UnixServer([PodResources(lists)], assignments.socket_beside(plugin_dir))
        await server.listen()
        options = ("--plugin-dir", plugin_dir, "--host-root", root, "--format", form)
        try:
            code, out, _ = await asyncio.to_thread(called, capsys, "allocations", *options)
        finally:
            await server.shutdown()
        assert code == 0
        return out

    out = asyncio.run(ask(held + claimed, "table"))
    rows = [[c.strip() for c in row.split("|")[1:-1]] for row in out.splitlines() if "|" in row]
    # Another driver's claim is not ours to list.
    assert rows == [
        ["Namespace", "Pod", "Container", "Card", "Cores", "Resource", "Device", "Claim"],
        ["default", "infer", "main", "npu1", "0-3", NPU, f"{RNGD.uuid}_cores_0-3", "-"],
        ["ml", "claims", "main", "-", "-", DRIVER, "npu-b", "a"],
        ["ml", "claims", "main", "npu0", "0-1", DRIVER, WHOLE, "b"],
        ["ml", "train", "main", "npu0", "0-1", NPU, CARD.uuid, "-"],
        ["ml", "train", "main", "-", "-", NPU, "UNKNOWN", "-"],
    ]
    assert "Claim" not in asyncio.run(ask(held, "table"))
    found = json.loads(asyncio.run(ask(held + claimed, "json")))
    keys = ("namespace", "pod", "container", "resource", "device", "claim", "card", "cores")
    assert list(map(tuple, found)) == [keys] * 5
    assert [tuple(one.values())[3:] for one in found] == [
        (NPU, f"{RNGD.uuid}_cores_0-3", None, "npu1", "0-3"),
        (DRIVER, "npu-b", "a", None, None),
        (DRIVER, WHOLE, "b", "npu0", "0-1"),
        (NPU, CARD.uuid, None, "npu0", "0-1"),
        (NPU, "UNKNOWN", None, None, None),
    ]


def test_allocations_watch_prints_every_change(plugin_dir: Path) -> None:
    async def watched() -> tuple[list[str], tuple[int, str, str]]:
        kubelet = PodResources(HELD)
        server = UnixServer([kubelet], assignments.socket_beside(plugin_dir))
        await server.listen()
        try:
            options = ("allocations", "-w", "-o", "json", "--plugin-dir", plugin_dir)
            with started(*options) as process:
                first = await asyncio.to_thread(process.printed, "train")
                kubelet.reply = pod("ml", "next", main={NPU: ["U2"]})
                second = await asyncio.to_thread(process.printed, "next")
                return [first, second], await asyncio.to_thread(process.end, signal.SIGINT)
        finally:
            await server.shutdown()

    (first, second), ended = asyncio.run(watched())
    assert len(json.loads(first)) == len(ASSIGNED)
    assert [one["pod"] for one in json.loads(second)] == ["next"]
    assert ended == (130, "", "")


@pytest.mark.parametrize(
    "command",
    ["info --watch --format json", "run --help"],
)
def test_reader_that_goes_away_is_no_reason_to_complain(root: Path, command: str) -> None:
    """As in `npu-agent info | head -0`: the pipe is closed before anything is written."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.Popen(
        [sys.executable, "-m", "npu_agent", "--host-root", str(root), *command.split()],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    os.close(write)
    _, err = done.communicate(timeout=DEADLINE)
    assert (done.returncode, err) == (1, "")


def test_a_full_disk_behind_stdout_is_an_error_of_one_line() -> None:
    command = [sys.executable, "-m", "npu_agent", "config", "schema"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment()
        )
    error = "npu-agent: error: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, error)


@pytest.mark.parametrize(
    ("encoding", "command", "words"),
    [
        ("ascii", "info", "?C |"),
        ("euc-kr", "run --help", "m°C, ?W"),
        ("ascii:backslashreplace", "info", "\\xb0C |"),
    ],
)
def test_a_character_that_stdout_lacks_is_shown_as_a_question_mark(
    root: Path, encoding: str, command: str, words: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "npu_agent", "--host-root", str(root), *command.split()],
        capture_output=True,
        encoding=encoding.partition(":")[0],
        timeout=DEADLINE,
        env=environment({"PYTHONIOENCODING": encoding}),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert words in done.stdout


def test_the_agent_needs_no_stdout(root: Path, plugin_dir: Path) -> None:
    """And nothing that it opens takes its place."""
    plugin_dir.mkdir()
    words = ("run", f"--plugin-dir={plugin_dir}", "--metrics-listen=127.0.0.1:0")
    closed = ("sh", "-c", 'exec "$@" >&-', "sh")
    with started("--host-root", root, *words, by=closed) as agent:
        agent.said("serving metrics and status")
        assert Path(f"/proc/{agent.pid}/fd/1").readlink() == Path(os.devnull)
        assert agent.end()[0] == 0


RED = "\x1b[31m"


@pytest.fixture
def hostile(root: Path) -> Path:
    """A host whose driver, and a config whose author, try to steer the terminal."""
    (entry,) = (root / "sys/class/npu_mgmt").glob("npu0_mgmt")
    for name in ("device_uuid", "device_sn", "version", "fw_version", "alive", "atr_error"):
        (entry / name).write_text(f"a{RED}b\x07\x9b\n", encoding="utf-8")
    (other,) = (root / "sys/class/rngd_mgmt").glob("rngd!npu1*mgmt")
    (other / "device_type").write_text(f"x{RED}", encoding="utf-8")
    (root / "config.yaml").write_text(
        'resourceName: "a\\e[31mb"\n"k\\ey": 1\nlog: {level: "\\e[1m"}\n', encoding="utf-8"
    )
    return root


@pytest.mark.parametrize(
    "command",
    [
        "info",
        "info -o json",
        "labels show",
        "doctor --all",
        "verify",
        "cdi generate --stdout",
        f"dra slices --template={RED}",
        f"info --host-root=/tmp/{RED}",
        "config check {root}/config.yaml",
        f"info{RED}",
        f"run --resource-name=x{RED}",
        f"config show --resource-name=x/y{RED}",
        f"allocations --plugin-dir=/tmp/{RED}",
        f"simulate /tmp/{RED} fault npu{RED} dead",
    ],
)
def test_output_never_steers_the_terminal(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for variable in ("NPU_DEVNAME", "FURIOSA_DEVICES"):
        monkeypatch.setenv(variable, f"npu0{RED}")
    words = command.replace("{root}", str(hostile)).split(" ")
    if "--host-root" not in command and words[0] in ("info", "labels", "doctor", "verify", "cdi"):
        words += ["--host-root", str(hostile)]
    _, out, err = called(capsys, *words)
    assert out + err
    assert {char for char in out + err if not char.isprintable()} <= {"\n"}
