"""A reader of the pages, who types their commands as they stand there, in a checkout."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.build import HELM, ensure_binaries
from tests.docs.pages import page
from tests.docs.typed import LINES_LEFT_OUT, commands, typed_by
from tests.e2e.journey.registry import PASSWORD, USER
from tests.e2e.journey.steps import Journey
from tests.e2e.node import PROJECT

_HOMES = ("CACHE", "CONFIG", "DATA")


class Reader:
    """Types commands in the directory `checkout`, next to which `overlay` is."""

    def __init__(self, node: Journey, directory: Path) -> None:
        self.node = node
        self.checkout = directory / "npu-agent"
        self.overlay = directory / "my-cluster" / "kustomization.yaml"
        self._programs = directory / "bin"
        self._typed: list[str] = []
        for made in (self.checkout, self.overlay.parent, self._programs):
            made.mkdir()
        for folder in ("k8s", "docs"):
            (self.checkout / folder).symlink_to(PROJECT / folder)
        (self._programs / "helm").symlink_to(ensure_binaries(HELM)["helm"])
        ours = self._programs / "npu-agent"
        ours.write_text(
            f'#!/bin/sh\nPYTHONPATH={PROJECT} exec {sys.executable} -m npu_agent "$@"\n',
            encoding="utf-8",
        )
        ours.chmod(0o755)

    def blocks(self, name: str, heading: str) -> list[str]:
        """The blocks of commands below a heading of a page; its files are written.

        A file that is there already gets the lines of the block in addition.
        """
        found = []
        for language, code in page(name).below(heading):
            if typed := "\n".join(commands(language, code)):
                found.append(typed)
            elif match := re.match(r"# ([\w./-]+\.yaml)\n", code):
                self._write(match[1], yaml.safe_load(code.replace("rngd", "warboy")))
        return found

    def _write(self, name: str, new: dict[str, Any]) -> None:
        mine = name.startswith("my-cluster/")
        path = (self.overlay.parent.parent if mine else self.checkout) / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        before: dict[str, Any] = yaml.safe_load(text) or {}
        for key, value in new.items():
            both = isinstance(value, list) and isinstance(before.get(key), list)
            before[key] = [*before[key], *value] if both else value
        path.write_text(yaml.safe_dump(before), encoding="utf-8")

    def types(self, text: str, timeout: float = 180, *, namespace: str = "kube-system") -> str:
        """Runs commands one after the other, until one fails; returns what they print.

        `namespace` takes the place of the one that the page names.
        """
        typed = [one for one in commands("sh", text) if one not in LINES_LEFT_OUT]
        self._typed += typed
        homes = [f"export HELM_{what}_HOME={self._programs.parent}/helm" for what in _HOMES]
        script = "\n".join(
            [
                f"cd {self.checkout}",
                f"export PATH={self._programs}:$PATH",
                *homes,
                *(self._meant(one).replace("kube-system", namespace) for one in typed),
            ]
        )
        return self.node.cluster.enter("sh", "-euc", script, timeout=timeout).stdout

    def _meant(self, command: str) -> str:
        """With the words that a reader replaces by their own."""
        command = re.sub(r"\bNODE\b(?!:)", self.node.name, command)
        return command.replace("=USER", f"={USER}").replace("=PASSWORD", f"={PASSWORD}")

    def check(self) -> None:
        """Sees to it that each command that the running test is named for was typed."""
        test, _, _ = os.environ["PYTEST_CURRENT_TEST"].partition(" ")
        missing = [one for one in typed_by(test) if one not in self._typed]
        assert not missing, missing
