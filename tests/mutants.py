# ruff: noqa: E501, ISC004 (quotes of the source as it stands there)
"""Faults made by hand, each of which a test has to notice: ``make mutants``.

Each fault is put into a copy of the package, the tests named for it are run there, and the faults
that they do not notice are printed. Words after the name choose faults: ``make mutants ARGS=ledger``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("npu_agent", "tests", "bench", "docs", "k8s", "pyproject.toml", "README.md")
DEADLINE = 600.0
"""Seconds for the tests of one fault; a hang counts as noticed."""

DEVICEPLUGIN = "tests/outputs/deviceplugin"


@dataclass(frozen=True, slots=True)
class Fault:
    """A change that breaks something."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    """Files, or one file and ``-k`` with what to choose there."""


def of(file: str, tests: str, *faults: tuple[str, str, str]) -> list[Fault]:
    """Faults of one file, each with its name, the text and what takes its place."""
    return [Fault(name, file, old, new, tests) for name, old, new in faults]


FAULTS = [
    *of(
        "npu_agent/inventory/rounds.py",
        "tests/inventory/test_rounds.py",
        ("rounds: nobody takes over", "self._take_over(self._doing[0])", "pass"),
        ("rounds: the others wait for the deadline", "_PATIENCE = 0.1", "_PATIENCE = 100.0"),
        ("rounds: hangs are found one by one", "        self._share_out()\n", ""),
        (
            "rounds: nobody watches after a hang",
            "self._maker, self._watcher, self._doing = threading.current_thread(), None, None",
            "self._maker, self._doing = threading.current_thread(), None",
        ),
        (
            "rounds: a thread stays after a hang",
            "if threading.current_thread() is self._maker:\n                self._doing",
            "if threading.current_thread():\n                self._doing",
        ),
        (
            "rounds: a task on two threads",
            "            if task.busy:\n                return False\n",
            "",
        ),
        ("rounds: news are not told", "self._news = True", "pass"),
        ("rounds: no way to wake it", "        self._making.end()\n", ""),
    ),
    *of(
        "npu_agent/inventory/rounds.py",
        "tests/inventory/test_inventory.py",
        (
            "rounds: a thread that is refused ends the rounds",
            "with suppress(RuntimeError):  # no more threads: the next",
            "with suppress(KeyError):  # no more threads: the next",
        ),
    ),
    *of(
        "npu_agent/inventory/watch.py",
        "tests/inventory/test_inventory.py",
        (
            "watch: a settled verdict outlives another card",
            "and self._settled[1] is self._known\n",
            "",
        ),
        (
            "watch: a settled verdict outlives a hang",
            "                    self._settled = None\n                    self.view",
            "                    self.view",
        ),
    ),
    *of(
        "npu_agent/vendors/furiosa/sysfs.py",
        "tests/vendors/furiosa/test_sysfs.py",
        (
            "sysfs: sensors are kept for good",
            "if before and before[0] == stamp:\n            return before[1]\n        files",
            "if before:\n            return before[1]\n        files",
        ),
        (
            "sysfs: sensors are never kept",
            "self._sensors_at[directory] = (stamp, tuple(files))",
            "pass",
        ),
    ),
    *of(
        "npu_agent/core/ledger.py",
        "tests/core/test_ledger.py",
        (
            "ledger: nodes never conflict",
            'return f"/dev/{min(nodes)}" if nodes else None',
            "return None",
        ),
        ("ledger: one answer ends a hold", "holds[name] = replace(hold, missed=asked_at)", "pass"),
        (
            "ledger: a card is known by its UUID alone",
            "return card.identities or",
            "return frozenset(k for k in card.identities if k.startswith('uuid')) or",
        ),
        (
            "ledger: unexplained IDs are not matched",
            "known = footprints_of(name[1], present)",
            "known = set()",
        ),
        (
            "ledger: a second card with the same UUID is trusted",
            "if len(alike) == 1 and not _contradict",
            "if not _contradict",
        ),
        (
            "ledger: an old answer names the holder of a new grant",
            "if hold is not None and asked_at < hold.since:",
            "if False:",
        ),
        (
            "ledger: a grant that was never listed ends early",
            "if asked_at < max(hold.since, hold.kept_until):",
            "if asked_at < hold.since:",
        ),
        (
            "ledger: an answer from before a start counts",
            "if asked_at < max(hold.since, hold.kept_until):",
            "if asked_at < hold.kept_until:",
        ),
        (
            "ledger: the record has no holds",
            "            footprints.setdefault(name, set()).update(hold.footprints)",
            "            pass",
        ),
        (
            "ledger: a damaged record is no record",
            "            found = _decoded(record)\n        except (",
            "            found = _decoded(record)\n        except ValueError:\n"
            "            return self\n        except (",
        ),
        (
            "ledger: an unknown ID may be nothing",
            "            self._anything.append((name, hold))",
            "            pass",
        ),
    ),
    *of(
        "npu_agent/outputs/deviceplugin/publisher.py",
        f"{DEVICEPLUGIN}/test_publisher.py",
        (
            "publisher: grants are not noted",
            "        self._ledger = self._ledger.granted(resource, devices, self._clock())\n",
            "        return\n",
        ),
        (
            "publisher: a grant does not ask the ledger",
            "            reason = self._claims.against(resource, device)\n            if (device",
            "            reason = None\n            if (device",
        ),
        (
            "publisher: a renumbered card is granted",
            "if (device.card.key, keys_of(device.card)) not in present:",
            "if False:",
        ),
        (
            "publisher: the record is not read again at a takeover",
            "        self._ledger = self._ledger.recovered(self._on_disk, self._clock())\n"
            "        await",
            "        await",
        ),
        (
            "publisher: offered before it is on the disk",
            "                if not wrote:\n                    self._put(lists)\n"
            "                    break",
            "                self._put(lists)\n                break",
        ),
        ("publisher: a new owner does not ask", "        await self._answer(_ANSWER)\n", ""),
        (
            "publisher: offered before the first answer",
            "if not snapshot.complete or not answer.asked_at:",
            "if not snapshot.complete:",
        ),
        (
            "publisher: a standby agent that ends removes the record",
            "        if not self._owner:\n            return\n        now",
            "        now",
        ),
        (
            "publisher: the record is removed under running Pods",
            "if held or starting or answer.error",
            "if starting or answer.error",
        ),
        (
            "publisher: a second answer is not asked for",
            "            if self._ledger.doubtful:\n                self._pod_resources.ask_soon()\n",
            "",
        ),
    ),
    *of(
        "npu_agent/outputs/deviceplugin/session.py",
        f"{DEVICEPLUGIN}/test_session.py",
        (
            "session: offered before the ledger is up to date",
            "                        await self._prepare()\n",
            "",
        ),
        (
            "session: dead sockets stay",
            "                        sweep(self._directory, self._socket_name)\n",
            "",
        ),
        (
            "session: fenced devices have to be offered",
            "for device in self._devices.value if device.healthy)",
            "for device in self._devices.value)",
        ),
        ("session: the first registration is a return", "+= self._lost", "+= 1"),
        ("session: a loss is not reported", "                self._kubelet_lost()\n", ""),
        ("session: no pause after a loss", "await asyncio.sleep(fickle.next())", "pass"),
        (
            "session: the same trouble is logged once for ever",
            '        self._told = ""\n        self._registrations',
            "        self._registrations",
        ),
        (
            "session: the proof goes on for ever",
            "            proving.cancel()\n            await asyncio.gather(proving",
            "            await asyncio.gather(asyncio.sleep(0)",
        ),
    ),
    *of(
        "npu_agent/outputs/deviceplugin/service.py",
        f"{DEVICEPLUGIN}/test_service.py",
        (
            "service: the ledger does not hear of a grant",
            "                self._note(self._resource, [one for each in containers for one in each])\n",
            "",
        ),
        (
            "service: unknown devices count as unhealthy",
            'Status.NOT_FOUND: "unknown"',
            'Status.NOT_FOUND: "unhealthy"',
        ),
    ),
    *of(
        "npu_agent/outputs/cdi.py",
        "tests/outputs/test_cdi.py",
        ("cdi: devices without nodes", "if device.nodes and _NAME", "if _NAME"),
        (
            "cdi: names that CDI forbids",
            "if device.nodes and _NAME.fullmatch(device.id):",
            "if device.nodes:",
        ),
    ),
    *of(
        "npu_agent/agent.py",
        "tests/test_lasting.py -k an_edit_is_followed",
        ("agent: grants are not noted", "note=self.publisher.grant,\n", ""),
    ),
    *of(
        "npu_agent/agent.py",
        "tests/test_agent.py",
        (
            "agent: failures and recoveries swapped",
            "failures=config.health.failures,\n            recoveries=config.health.recoveries,",
            "failures=config.health.recoveries,\n            recoveries=config.health.failures,",
        ),
        (
            "agent: health.maxTemperature has no effect",
            "            max_temperature=config.health.max_temperature,\n        ),",
            "        ),",
        ),
        (
            "agent: events cannot be switched off",
            "wanted=configs.map(lambda config: config.events)",
            "wanted=configs.map(lambda config: True)",
        ),
        (
            "agent: labels.sets is not followed",
            "label_sets(VOCABULARIES, config.labels.sets)",
            'label_sets(VOCABULARIES, ["beta"])',
        ),
        (
            "agent: labels.resync is not followed",
            "resync=configs.map(lambda config: config.labels.resync)",
            "resync=configs.map(lambda config: 300.0)",
        ),
        (
            "agent: metrics.schema is not followed",
            "metric_schemas(VOCABULARIES, config.metrics.schema)",
            'metric_schemas(VOCABULARIES, "0.8")',
        ),
        (
            "agent: metrics.podLabels is not followed",
            "pod_labels=config.metrics.pod_labels",
            "pod_labels=True",
        ),
        ("agent: a takeover renews nothing", "prepare=self.publisher.renew,\n", ""),
        (
            "agent: no proof of registration",
            "offered=partial(_offered, socket_beside(directory)),\n",
            "",
        ),
        ("agent: losses are not reported", "kubelet_lost=self.publisher.kubelet_lost,\n", ""),
        (
            "agent: IDs are forgotten over a restart",
            "            known=Ledger().recovered(left_behind(directory), time.monotonic()).cards,\n",
            "",
        ),
        ("agent: the publisher does not end", "            await self.publisher.end()\n", ""),
    ),
]


def noticed(fault: Fault, copy: Path) -> bool:
    """Whether the tests named for a fault fail with it.

    Raises:
        ValueError: the text that it changes is not there, or not there once.
    """
    path = copy / fault.file
    good = path.read_text()
    if good.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {good.count(fault.old)} places in {fault.file}")
    path.write_text(good.replace(fault.old, fault.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *fault.tests.split()],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            timeout=DEADLINE,
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(good)
    return done.returncode == 1


def main(*chosen: str) -> int:
    """Tries the faults with one of these words in their names, or all; returns 1 if one survives."""
    faults = [one for one in FAULTS if not chosen or any(word in one.name for word in chosen)]
    survivors = []
    with tempfile.TemporaryDirectory(prefix="npu-mutants-") as temporary:
        copy = Path(temporary)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        for fault in faults:
            good = noticed(fault, copy)
            print("noticed " if good else "SURVIVED", fault.name, flush=True)
            if not good:
                survivors.append(fault.name)
    print(f"{len(faults) - len(survivors)} of {len(faults)} faults noticed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
