"""`kubectl_complete-npu`: what may come next on the command line of `kubectl npu`.

kubectl runs it with the words so far, the last of which is to be completed. It prints a candidate a
line, with a tab and its help, and at last what the shell does with them: ``:4``, no file names.

Source: k8s.io/kubectl/pkg/cmd/plugin/plugin_completion.go; cobra's shell completions.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Iterable, Sequence

from npu_agent.cli import CommandError
from npu_agent.kube import ApiError
from npu_agent.people.cluster.fetch import agents, fetch, report_of
from npu_agent.people.cluster.objects import AGENT
from npu_agent.people.cluster.proxy import through_kubectl
from npu_agent.people.commands.kubectl import flags, parser
from npu_agent.text import one_line

_FILES = 0
_NO_FILES = 4
_NAMED = ("node", "npu", "pod", "namespace")
"""Arguments that name objects of the cluster."""
_DEADLINE = 5.0
"""Seconds: a person waits."""
_PLAIN = re.compile(r"[A-Za-z0-9._:/-]+")
"""Candidates: the completion of kubectl up to 1.32 has bash expand them, commands too."""


def main(args: argparse.Namespace) -> int:
    """Completes the last of `args.words`."""
    *before, last = args.words or [""]
    line = _Line(before)
    files = line.open is not None and line.open.dest == "kubeconfig"
    for candidate, text in [] if files else _candidates(line, last):
        if candidate.startswith(last) and _PLAIN.fullmatch(candidate):
            print(f"{candidate}\t{one_line(text)}".rstrip("\t"))
    print(f":{_FILES if files else _NO_FILES}")
    return 0


class _Line:
    """The words before the last one, as far as they say what it may be."""

    def __init__(self, words: Iterable[str]) -> None:
        self.parser: argparse.ArgumentParser = parser()
        self.args = self.parser.parse_args([])
        self.named: list[str] = []
        """The arguments after the command that are not options."""
        self.open: argparse.Action | None = None
        """The option whose value comes next."""
        self.commands = next(
            action.choices
            for action in self.parser._actions  # noqa: SLF001 (as shtab does)
            if isinstance(action.choices, dict)
        )
        for word in words:
            self._read(word)

    def _read(self, word: str) -> None:
        name, equals, value = word.partition("=")
        if self.open:
            self.open(self.parser, self.args, word)
            self.open = None
        elif word.startswith("-"):
            option = self.parser._option_string_actions.get(name)  # noqa: SLF001
            if option and option.nargs != 0:
                self.open = option
                if equals:
                    self._read(value)
        elif self.commands and word in self.commands:
            self.parser = self.commands[word]
            self.commands = {}
        else:
            self.named.append(word)


def _candidates(line: _Line, last: str) -> Iterable[tuple[str, str]]:
    """Words that may come next, with their help."""
    if line.open is None and last.startswith("-"):
        options = line.parser._actions  # noqa: SLF001
        return [(name, option.help or "") for option in options for name in option.option_strings]
    if line.open is None and line.commands:
        return [(name, command.description or "") for name, command in line.commands.items()]
    wanted = line.open
    if wanted is None:
        places = line.parser._get_positional_actions()  # noqa: SLF001
        wanted = next(iter(places[len(line.named) :]), None)
        if wanted is None and places and places[-1].nargs == "*":
            wanted = places[-1]
    if wanted is None or wanted.dest not in _NAMED:
        return [(name, "") for name in (wanted and wanted.choices) or ()]
    try:
        names = asyncio.run(asyncio.wait_for(_objects(wanted.dest, line), _DEADLINE))
    except (ApiError, CommandError, TimeoutError):
        return []  # a person who has pressed Tab gets no error
    return [(name, "") for name in names]


async def _objects(kind: str, line: _Line) -> Sequence[str]:
    """Returns the names in the cluster for an argument."""
    async with through_kubectl(flags(line.args), asks=False) as (api, place):
        if kind == "npu":
            return [card.name for card in (await report_of(api, line.named[0])).cards]
        if kind == "node":
            cluster = await fetch(api, "pods", "daemon_sets", selectors={"pods": AGENT})
            return sorted(agents(cluster))
        if kind == "namespace":
            return sorted({pod.namespace for pod in (await fetch(api, "pods")).pods})
        space = line.args.namespace or place.namespace
        return [pod.name for pod in (await fetch(api, "pods", namespace=space)).pods]
