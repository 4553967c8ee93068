"""The guided tour: the whole agent between simulated cards and stand-ins for Kubernetes.

The steps are in `npu_agent.people.commands.demo_tour`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

from npu_agent import logs
from npu_agent.agent.agent import Agent
from npu_agent.agent.parts import Host
from npu_agent.agent.run import serve
from npu_agent.cli import FAILED, CommandError
from npu_agent.config import load
from npu_agent.kube import Api
from npu_agent.kube.credentials import at
from npu_agent.kubelet.rpc import GRPCError
from npu_agent.people import simulator
from npu_agent.people.commands.demo_tour import CLAIMED, DEADLINE, NODE, Tour
from npu_agent.people.simulator.apiserver import StandInApiServer, served
from npu_agent.people.simulator.kubelet import NotEnoughError, StandInKubelet
from npu_agent.people.simulator.pluginmanager import PrepareError, StandInPluginManager
from npu_agent.text import reason
from npu_agent.vendors import SPEC

_CONFIG = """\
defaultPe: Fusion
dra: {{partitions: false}}
# Each family has its API: these cards are for claims, the others for the device plugin.
resources: [{{family: {family}, name: {resource}, api: dra}}]
pluginDir: {plugins}
# Brisk: the tour should not take long.
health: {{interval: 0.1, condition: {{type: {condition}}}}}
metrics: {{interval: 1, listen: '127.0.0.1:0', probes: '127.0.0.1:0'}}
events: false
"""


def main(args: argparse.Namespace) -> int:
    """Exit code 1 if a step of the tour did not happen."""
    try:
        return asyncio.run(run(once=args.once))
    except ExceptionGroup as errors:  # of what runs side by side
        first = errors.exceptions[0]
        if isinstance(first, OSError):  # such as of stdout, which `npu_agent.cli` knows about
            raise first from errors
        raise


async def run(*, once: bool, deadline: float = DEADLINE) -> int:
    """Gives the tour; without `once` stays up until Ctrl-C. A step may take `deadline` seconds."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has SIGHUP ignored
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    specs = simulator.parse_cards(f"{simulator.default_cards()},{CLAIMED}=1")
    async with contextlib.AsyncExitStack() as ends:
        try:
            directory = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="npu-demo-")))
            root = directory / "host"
            log = directory / "agent.log"
            file = directory / "config.yaml"
            plugins = directory / "device-plugins"
            plugins.mkdir()
            simulator.make(root, specs)
            file.write_text(
                _CONFIG.format(
                    family=CLAIMED,
                    resource=SPEC.resource_name,
                    plugins=plugins,
                    condition=SPEC.condition,
                ),
                encoding="utf-8",
            )
            _log_to(log)
            manager = StandInPluginManager(directory)
            kubelet = StandInKubelet(plugins, directory / "pod-resources")
            await kubelet.start()
        except (simulator.SimulatorError, OSError) as error:
            raise CommandError(
                f"{reason(error)}: set TMPDIR to a directory with 10 MB to spare, and a short path"
            ) from error
        print(
            "The whole agent on three simulated cards: "
            f"npu0 and npu1 ({specs[0].traits.title}) by\n"
            f"the device plugin, npu2 ({specs[2].traits.title}) by DRA. Each line below is what\n"
            "stand-ins for the kubelet and the API server have received.\n"
            f"The host's files are below {root},\n"
            f"the config is {file},\n"
            f"the agent's log is in {log}."
        )
        ends.push_async_callback(kubelet.stop)
        ends.push_async_callback(manager.stop)
        await manager.start()
        api_server = StandInApiServer(NODE)
        url = await ends.enter_async_context(served(api_server.answer))
        host = Host(root, NODE, simulation=partial(simulator.simulate, root))
        api = Api(lambda: at(url, "the demo"))
        agent = Agent(load(file, SPEC), host, config_file=file, api=api)
        tour = Tour(
            root=root,
            config=file,
            specs=specs,
            kubelet=kubelet,
            manager=manager,
            api_server=api_server,
            agent=agent,
        )
        async with asyncio.TaskGroup() as parts:
            parts.create_task(serve(agent, stop))
            walk = parts.create_task(_walk(tour, deadline))
            ended = parts.create_task(stop.wait())
            await asyncio.wait({walk, ended}, return_when=asyncio.FIRST_COMPLETED)
            failed = walk.done() and not walk.result()  # not if a person ends it before
            if failed:
                last = log.read_text(encoding="utf-8").splitlines()[-10:]
                print("\nThe end of the agent's log:", *last, sep="\n   ")
            elif walk.done():
                print(f"\n{_styled('All steps passed.')}", flush=True)
                if not once:
                    await _stay_up(tour, ended)
            walk.cancel()
            stop.set()
    return FAILED if failed else 0


async def _stay_up(tour: Tour, ended: asyncio.Task[bool]) -> None:
    called = sys.argv[0]
    command = called if Path(called).name == "npu-agent" else f"{sys.executable} -m npu_agent"
    print(
        f"The agent stays up until Ctrl-C: see\n"
        f"   http://{await tour.address()}/   and try:\n"
        f"   {command} info --host-root {tour.root}\n"
        f"   {command} simulate {tour.root} fault npu0 dead     (and: ... npu0 ok)\n"
        f"   an edit of {tour.config}\n"
        "   simulated cards in a cluster: Helm value or component `simulate`\n"
        "Its log from here on:",
        flush=True,
    )
    logs.setup("info")
    await ended


async def _walk(tour: Tour, deadline: float) -> bool:
    """Prints each step as it happens; returns whether all did, and stops at a failure."""
    for number, (title, step) in enumerate(tour.steps(), 1):
        print(f"\n{_styled(f'{number}. {title}')}", flush=True)
        try:
            async with asyncio.timeout(deadline):
                lines = [line async for line in step()]
        except TimeoutError:
            return _failed(f"this did not happen within {deadline:g} s")
        except GRPCError as error:
            return _failed(f"{error.status.name}: {error.message}")
        except (NotEnoughError, PrepareError, simulator.SimulatorError, OSError) as error:
            return _failed(str(error))
        for line in lines:
            print(f"   {_styled('✔', 32)} {line}", flush=True)
    return True


def _log_to(path: Path) -> None:
    logs.setup("debug")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.getLogger().handlers[0].formatter)
    logging.getLogger().handlers[:] = [handler]


def _styled(text: str, style: int = 1) -> str:
    """The text, bold or in a colour of ANSI on a terminal."""
    return f"\033[{style}m{text}\033[0m" if sys.stdout.isatty() else text


def _failed(reason: str) -> bool:
    print(f"   ✘ {reason}", flush=True)
    return False
