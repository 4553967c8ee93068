"""`npu-agent doctor`: runs all checks, and shows first what to fix, then each subject."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from npu_agent import logs
from npu_agent.cli import FAILED, host_root
from npu_agent.config import Config, ConfigError, default_config, file_of, from_args
from npu_agent.kube import ApiError
from npu_agent.people import running
from npu_agent.people.cluster.proxy import end_children
from npu_agent.people.commands import view
from npu_agent.people.commands.common import vendor
from npu_agent.people.doctor import agent, cluster, dra, host, kubelet
from npu_agent.people.doctor.check import (
    Check,
    Context,
    Lines,
    State,
    Unknown,
    failed,
    note,
    ok,
    unknown,
    wrong,
)
from npu_agent.text import listed
from npu_agent.vendors import SPEC

if TYPE_CHECKING:
    from rich.table import Table

log = logs.logger(__name__)

_STYLES = {State.WRONG: "red", State.NOTE: "yellow", State.UNKNOWN: "yellow"}
_NAME = 22
"""Columns for the name of a line on a terminal."""
SUBJECTS: tuple[tuple[str, Callable[[Context], Lines]], ...] = (
    ("Running agent", agent.lines),
    ("Hardware", host.lines),
    ("Kubelet", kubelet.lines),
    ("Cluster", cluster.lines),
    ("DRA", dra.lines),
)
"""What the agent reports comes first; then in the order in which people fix what is wrong."""


def main(args: argparse.Namespace) -> int:
    """Exit code 1 if anything is wrong."""
    wanted, good = configuration(args)
    # The file's level is the agent's: here it would mix the probes' own log with the lines.
    asked = "config.log.level" in args
    logs.setup(wanted.log.level if asked else "error", wanted.log.format)
    context = Context.here(wanted, host_root(args), vendor(args))

    async def act() -> int:
        checks = [*map(context.at_desk, (good, *await examine(context)))]
        if view.is_data(args):
            print(view.data([check.as_json() for check in checks], args))
        else:
            wide = args.output == "wide"
            columns = None if wide else view.terminal_width()
            shown = parts(checks, everything=wide or args.all, columns=columns)
            print(view.drawn(*shown, wide=wide))
        # Shown here: what hangs after all, such as a name that is resolved, may delay the end.
        sys.stdout.flush()
        return FAILED if failed(checks) else 0

    try:
        return asyncio.run(act())
    finally:
        end_children(os.getpid())  # a login program of the kubeconfig may hang


def configuration(args: argparse.Namespace) -> tuple[Config, Check]:
    """The configuration to check by, and its line; the defaults where a file is refused.

    Raises:
        ConfigError: the command line itself is wrong.
    """
    file = file_of(args)
    try:
        config = from_args(args, SPEC).config
        line = ok(f"{file} is good" if file else "no file: options and defaults")
    except ConfigError as error:
        if file is None or any(p.place.source.startswith("--") for p in error.problems):
            raise
        config = default_config(SPEC)
        line = wrong(
            "; ".join(map(str, error.problems)),
            "fix it; the rest was checked with the defaults",
            f"npu-agent config check {file}",
        )
    return config, replace(line, name="config", section="Configuration")


async def examine(context: Context) -> tuple[Check, ...]:
    """Every line but the one on the configuration. No subject waits for another."""
    fresh = replace(context)  # with nothing probed yet
    if await _has_kubernetes(fresh):
        wanted = SUBJECTS
        checks = []
    else:
        wanted = (("Hardware", host.lines),)
        checks = [replace(_NO_KUBERNETES, name="Kubernetes", section="Kubernetes")]
    subjects = await asyncio.gather(*(run(section, lines(fresh)) for section, lines in wanted))
    return (*(check for subject in subjects for check in subject), *checks)


_NO_KUBERNETES = note(
    "not on this host (no directory of a kubelet, no npu-agent, no NODE_NAME): only the host is "
    "checked"
)


async def _has_kubernetes(context: Context) -> bool:
    """Whether this host is, or should be, a Node."""
    if context.in_pod or context.node_name:
        return True
    if running.Answer.AGENT in (await context.probe(agent.reported)).answers.values():
        return True
    try:
        # What is in the kubelet's own directory only root may see.
        return await context.in_thread(context.directory.parent.exists)
    except Unknown:
        return True


async def run(section: str, lines: Lines) -> list[Check]:
    """Runs all checks of a subject at the same time.

    A fault of our own is a line; the other lines stay. Where `lines` itself ends with Unknown or
    ApiError, another line has said so.
    """
    running: list[asyncio.Task[Check]] = []
    try:
        async for name, check in lines:
            running.append(asyncio.create_task(_checked(section, name, check)))
    except (Unknown, ApiError):
        pass
    except Exception as error:  # the edge: the other subjects go on
        running.append(asyncio.create_task(_checked(section, section, _fault(error))))
    return [await task for task in running]


async def _checked(section: str, name: str, check: Check | Coroutine[Any, Any, Check]) -> Check:
    try:
        line = check if isinstance(check, Check) else await check
    except Unknown as error:
        line = error.check
    except ApiError as error:
        line = unknown(error.what)
    except Exception as error:  # as above
        line = _fault(error)
    return replace(line, name=name, section=section)


def _fault(error: Exception) -> Check:
    log.debug("a check failed", exc_info=error)
    return unknown(f"internal error: {error!r}")


def parts(checks: Sequence[Check], *, everything: bool, columns: int | None) -> Iterator[object]:
    """The report: tables of rich, and lines. Nothing is cut: long words are folded.

    `everything` has lines too that do not apply. `columns` of the terminal; None: as many as it
    takes.
    """
    if first := _alike(check for check in checks if check.state is State.WRONG):
        things = "things" if len(first) > 1 else "thing"
        yield f"{len(first)} {things} to fix, in this order:"
        yield ""
        yield _fixes(first)
    numbers = {check: at for at, alike in enumerate(first, 1) for check in alike}
    shown = [check for check in checks if everything or check.state is not State.UNUSED]
    longest = max((len(check.name) for check in shown), default=0)
    width = longest if columns is None else min(longest, _NAME, columns // 3)
    for section in dict.fromkeys(check.section for check in shown):
        yield section
        yield _section([check for check in shown if check.section == section], numbers, width)
    states = [check.state for check in checks if check.state is not State.UNUSED]
    yield ", ".join(f"{states.count(state)} {state.value}" for state in State if state in states)
    if unused := len(checks) - len(shown):
        yield f"Not shown: lines that do not apply here ({unused}); --all shows them"


def _alike(checks: Iterable[Check]) -> list[list[Check]]:
    """Groups lines that are wrong in the same way for many cards."""
    groups: dict[tuple[str, str], list[Check]] = {}
    for check in checks:
        groups.setdefault((check.name.partition(" ")[0], check.detail), []).append(check)
    return [*groups.values()]


def _fixes(groups: Sequence[Sequence[Check]]) -> Table:
    table = _table(2)
    for at, (check, *others) in enumerate(groups, 1):
        also = [other.name.partition(" ")[2] for other in others]
        table.add_row(f"{at}.", f"{listed((check.name, *also), 4)}: {check.detail}", style="red")
        table.add_row("", f"-> {check.remedy}")
        if check.command:
            table.add_row("", f"$ {check.command}")
        table.add_row("", "")
    return table


def _section(checks: Sequence[Check], numbers: Mapping[Check, int], width: int) -> Table:
    table = _table(len(State.UNKNOWN.value), width)
    for check in checks:
        text = check.detail
        if check in numbers:
            text += f" (see {numbers[check]}.)"
        elif check.remedy:
            text += f"\n-> {check.remedy}"
        table.add_row(check.state.value, check.name, text, style=_STYLES.get(check.state))
    table.add_row("", "", "")
    return table


def _table(*widths: int) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    for width in widths:
        table.add_column(width=width, overflow="fold")
    table.add_column(overflow="fold")
    return table
