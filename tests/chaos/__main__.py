"""Plays the attacks: `python -m tests.chaos`, which is `make chaos`.

Without options it plays all, including those on a real kubelet, and prints each result.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tests.chaos.attacks import ATTACKS
from tests.chaos.table import Attack, first_paragraph
from tests.chaos.world import withstood, world
from tests.cluster import KUBELETS

PROJECT = Path(__file__).parents[2]
REAL = ("tests/e2e/test_it_keeps_working.py", "tests/e2e/test_attacks.py")
"""What is played on a real kubelet."""
DEADLINE = 600.0
"""Seconds that an attack may take with the agent's start; guards against hanging."""
BESIDE = 4
"""Attacks that are played at the same time, each on an agent of its own: most of them wait."""


@dataclass(frozen=True)
class Result:
    """One line of what is printed."""

    what: str
    failure: str
    """Empty if all assertions held."""

    def __str__(self) -> str:
        return f"FAILED: {self.failure}: {self.what}" if self.failure else f"passed: {self.what}"


async def played(attack: Attack) -> Result:
    """Plays one attack on an agent of its own, and prints what came of it."""
    failure, began = "", time.monotonic()
    with tempfile.TemporaryDirectory(prefix="npu-chaos-") as name:
        directory = Path(name)
        try:
            async with (
                asyncio.timeout(DEADLINE),
                world(directory, attack.cards, attack.config, attack.start, attack.prepare) as here,
            ):
                await withstood(here, attack.play)
        except Exception as error:  # whatever it is, something is not as it should be
            traceback.print_exc()
            print(
                (directory / "agent.log").read_text(errors="replace", encoding="utf-8")[-5000:],
                file=sys.stderr,
            )
            lines = str(error).splitlines() or [type(error).__name__]
            failure = lines[0][:200]
    result = Result(attack.what, failure)
    print(f"{time.monotonic() - began:5.1f} s  {attack.name}: {result}", flush=True)
    return result


async def all_played(attacks: Sequence[Attack]) -> list[Result]:
    """Plays attacks beside each other, and then, one by one, those that take the whole machine.

    What is not withstood beside others is played again alone: they are not what is tested.
    """
    turn = asyncio.Semaphore(BESIDE)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(8 * BESIDE))

    async def one(attack: Attack) -> Result:
        async with turn:
            return await played(attack)

    many = [attack for attack in attacks if not attack.alone]
    beside = await asyncio.gather(*map(one, many))
    last = [
        await played(attack) if result.failure else result
        for attack, result in zip(many, beside, strict=True)
    ]
    return [*last, *[await played(attack) for attack in attacks if attack.alone]]


def on_a_real_kubelet() -> Iterator[Result]:
    """The scenarios of tests/e2e, which build and start a real Kubernetes."""
    with tempfile.TemporaryDirectory(prefix="npu-chaos-") as name:
        report = Path(name) / "report.xml"
        subprocess.run([sys.executable, "-m", "tests.cluster", "build"], cwd=PROJECT, check=True)
        command = [sys.executable, "-m", "pytest", *REAL, "-k", max(KUBELETS)]
        subprocess.run([*command, f"--junit-xml={report}"], cwd=PROJECT)
        for case in ET.parse(report).iter("testcase"):
            test = case.get("name", "").partition("[")[0]
            broken = [part for part in case if part.tag in ("failure", "error")]
            failure = (broken[0].get("message") or "failed").splitlines()[0][:200] if broken else ""
            play = getattr(import_module(case.get("classname", "")), test)
            yield Result(first_paragraph(play), failure)


def main() -> int:
    """Prints each result as it comes; 1 if an attack failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--short", action="store_true", help="those that CI plays")
    parser.add_argument("--no-cluster", action="store_true", help="not those on a real kubelet")
    parser.add_argument("names", nargs="*", metavar="NAME", help="functions of tests/chaos/attacks")
    wanted = parser.parse_args()
    if unknown := set(wanted.names) - {attack.name for attack in ATTACKS}:
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    attacks = [
        attack
        for attack in ATTACKS
        if (attack.name in wanted.names if wanted.names else attack.short or not wanted.short)
    ]
    if os.geteuid() != 0:
        for attack in attacks:
            if attack.root:
                print(f"left out, as it needs root: {attack.what}")
        attacks = [attack for attack in attacks if not attack.root]
    results = asyncio.run(all_played(attacks))
    if not wanted.short and not wanted.names and not wanted.no_cluster:
        for result in on_a_real_kubelet():
            print(result, flush=True)
            results.append(result)
    failed = [result for result in results if result.failure]
    print(f"{len(results) - len(failed)} of {len(results)} passed", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
