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
DRA = "tests/outputs/dra"
LABELS = "tests/outputs/labels"


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
        "npu_agent/core/pool.py",
        "tests/core/test_pool.py",
        (
            "parts: a card is called like a part of another",
            " and not _LIKE_A_PART.search(name)",
            "",
        ),
        (
            "parts: names that are too long",
            "if len(name) + len(part) > _LONGEST_NAME:",
            "if not name:",
        ),
        (
            "parts: the whole card is no width",
            "return tuple(sorted(widths | {card.core_count}, reverse=True))",
            "return tuple(sorted(widths, reverse=True))",
        ),
        (
            "parts: counters where nothing is cut",
            'counters=name if len(widths) > 1 else "",',
            "counters=name,",
        ),
    ),
    *of(
        "npu_agent/outputs/dra/slices.py",
        f"{DRA}/test_slices.py",
        (
            "parts: a card in two slices",
            "for group in [list(together)] if counters else (",
            "for group in (",
        ),
        ("parts: too many counters in a slice", "_SETS_PER_SLICE = 8", "_SETS_PER_SLICE = 9"),
        (
            "parts: a device consumes the whole card",
            "_counters(each.device.cores)}",
            "_counters(each.device.card.all_cores)}",
        ),
        (
            "parts: devices before counters",
            '("devices" in it["spec"], it["metadata"]["name"] not in live)',
            'it["metadata"]["name"] not in live',
        ),
    ),
    *of(
        "npu_agent/outputs/dra/publisher.py",
        f"{DRA}/test_publisher.py",
        ("parts: counters are not tried", "            await self._try_counters()\n", ""),
        (
            "parts: what is put back is not tried",
            "slices.counts(each) and not slices.counts(live.get(each[",
            "False and not slices.counts(live.get(each[",
        ),
        (
            "parts: a pool is completed without its counters",
            "return  # with the rest the pool",
            "pass  # with the rest the pool",
        ),
        (
            "parts: they stay without counters",
            "            devices = whole_cards(devices)\n",
            "            pass\n",
        ),
        (
            "parts: an API server that refuses counters is trouble",
            "                if error.status != 422:\n                    raise\n",
            "                raise\n",
        ),
        (
            "parts: another API server is not asked",
            "        self._tried = False\n        if self._dropped",
            "        if self._dropped",
        ),
    ),
    *of(
        "npu_agent/outputs/dra/driver.py",
        "tests/test_agent_parts.py",
        (
            "parts: what is dropped changes nothing",
            "cut = wanted.partitions and not self._uncounted.value",
            "cut = wanted.partitions",
        ),
        (
            "parts: what is whole now cannot be prepared",
            "partitions=True,  # a claim",
            "partitions=False,  # a claim",
        ),
        (
            "parts: the kubelet hears nothing of what is not offered",
            "(*offered, *(one for one in known if one.name in held))",
            "offered",
        ),
        (
            "parts: they follow no config",
            "cut = wanted.partitions and",
            "cut = False and",
        ),
        (
            "parts: cores count that are in no slice, as taints are dropped",
            "            and not (one.taints and self._untainted.value)\n",
            "",
        ),
    ),
    *of(
        "npu_agent/doctor/classes.py",
        "tests/doctor/test_classes.py",
        (
            "classes: the oldest counts",
            "key=lambda one: one.created, reverse=True",
            "key=lambda one: one.created",
        ),
        ("classes: one comparison is enough", "return all(_equal(", "return any(_equal("),
        ("classes: ours may not wait for a family", "        and not each.shipped\n", ""),
        (
            "classes: a flag is a number",
            "type(one) is type(value) and one == value",
            "one == value",
        ),
    ),
    *of(
        "npu_agent/rounds.py",
        "tests/test_rounds.py",
        (
            "rounds: nobody takes over",
            "                    self._hands.remove(other)\n                    return since, None\n",
            "                    return None, None\n",
        ),
        ("rounds: both threads amid a round", "            me.amid = True\n", "            pass\n"),
        (
            "rounds: what waited for a hang is found later",
            "int((late + self._waited) / interval)",
            "int(late / interval)",
        ),
        (
            "rounds: deadlines are taken back when the interval becomes longer",
            "max(before, int((late + self._waited) / interval) + 1)",
            "int((late + self._waited) / interval) + 1",
        ),
        (
            "rounds: a round goes on with the tasks before",
            "if self._tasks is tasks and task.due",
            "if task.due",
        ),
        ("rounds: the others wait for the deadline", "_PATIENCE = 0.1", "_PATIENCE = 100.0"),
        (
            "rounds: hangs are found one by one",
            "            self._share_out(since, min(time.monotonic(), me.wakes))\n",
            "",
        ),
        (
            "rounds: nobody looks after a hang",
            "me.wakes))\n            self._complete()\n",
            "me.wakes))\n",
        ),
        (
            "rounds: what is shared out has not waited",
            "target=self._do_alone, args=(task, waited)",
            "target=self._do_alone, args=(task, 0.0)",
        ),
        (
            "rounds: what was late before a hang has waited for it",
            "until - max(since, task.due)",
            "until - task.due",
        ),
        (
            "rounds: what was stopped has waited",
            "self._share_out(since, min(time.monotonic(), me.wakes))",
            "self._share_out(since, time.monotonic())",
        ),
        (
            "rounds: what is late has waited though nothing hangs",
            "            task.begins(waited)\n",
            "            task.begins(waited or time.monotonic() - task.due)\n",
        ),
        (
            "rounds: a thread stays after a hang",
            "            return me in self._hands\n",
            "            return bool(self._tasks)\n",
        ),
        (
            "rounds: a task on two threads",
            "            if task.busy:\n                return False\n",
            "",
        ),
        (
            "rounds: news are not passed on",
            "        self.news = True\n",
            "        pass\n",
        ),
        (
            "rounds: the same news again and again",
            "            task.news = False\n",
            "            pass\n",
        ),
        ("rounds: no way to wake it", "            hand.pause.end()\n", "            pass\n"),
        (
            "rounds: a rest without an end ends the thread",
            "rest = min(moment - time.monotonic(), _LONGEST_REST)",
            "rest = moment - time.monotonic()",
        ),
        (
            "rounds: a task that fails ends the round",
            "        except Exception:\n            with task.lock:",
            "        except KeyError:\n            with task.lock:",
        ),
        (
            "rounds: a fault ends the thread",
            "            except Exception:\n                # A fault of our own",
            "            except KeyError:\n                # A fault of our own",
        ),
        (
            "rounds: a fault swallows news",
            "                task.news = True  # it may not have been passed on\n",
            "                pass\n",
        ),
        (
            "rounds: a thread that has ended is not missed",
            "if not hand.thread.is_alive()]",
            "if False]",
        ),
        (
            "rounds: a thread that is refused ends the rounds",
            "                    if not self._hands:\n                        raise\n",
            "                    raise\n",
        ),
        (
            "rounds: both threads wake up for each round",
            "due if mine else due + _CHECK_AFTER",
            "due",
        ),
        (
            "rounds: one thread makes all rounds, and the other one wakes up as well",
            "mine = all(one.wakes > due + _SAME for one in self._hands if one is not me)",
            "mine = me is self._hands[0]",
        ),
        (
            "rounds: threads with nothing to do",
            "            if not self._tasks and me in self._hands:\n"
            "                self._hands.remove(me)\n",
            "",
        ),
        (
            "rounds: what a poll finds again is passed on",
            "        if found != self._last:\n",
            "        if True:\n",
        ),
        (
            "rounds: polling goes on after its end",
            "            self.follow(task, ())\n",
            "            pass\n",
        ),
    ),
    *of(
        "npu_agent/kubelet/rpc.py",
        "tests/kubelet/test_rpc.py",
        (
            "rpc: a connection for each call",
            "        if self._channel:\n            with",
            "        if False:\n            with",
        ),
        (
            "rpc: a connection that failed is kept",
            "        except BaseException:\n            self.close()\n            raise\n",
            "        except ZeroDivisionError:\n            raise\n",
        ),
        ("rpc: a connection is used for ever", "if self._calls >= _CALLS or ", "if "),
        (
            "rpc: a connection leads to the server before",
            "if self._calls >= _CALLS or _made(self.path) != self._leads_to:",
            "if self._calls >= _CALLS:",
        ),
    ),
    *of(
        "npu_agent/kubelet/podresources.py",
        "tests/kubelet/test_podresources.py",
        (
            "pod-resources: asked as often while there is no news",
            "max(interval, _SELDOM)",
            "interval",
        ),
        (
            "pod-resources: asked seldom while it does not answer",
            "if self.no_news() and not error:",
            "if self.no_news():",
        ),
    ),
    *of(
        "npu_agent/kubelet/ledger.py",
        "tests/kubelet/test_ledger.py",
        (
            "keeper: no news of another agent's devices",
            "return self._owner and not (\n            self._trouble",
            "return not (\n            self._trouble",
        ),
        ("keeper: a grant cannot end", "            or ledger.holds\n", ""),
        ("keeper: a claim cannot end", "            or ledger.prepared\n", ""),
        (
            "keeper: what no record has cannot end",
            "            or answer.assignments  # another",
            "            # another",
        ),
    ),
    *of(
        "npu_agent/config/poller.py",
        "tests/config/test_poller.py",
        (
            "poller: a read that failed is not tried again soon",
            "_READ_AGAIN if self._judged is None else",
            "",
        ),
        (
            "poller: a change that does not show is never read",
            "await set_within(self._now, pause)",
            "await self._now.wait()",
        ),
        (
            "poller: nobody polls the file",
            "_POLL_EVERY, lambda _: self._now.set()",
            "_POLL_EVERY, lambda _: None",
        ),
    ),
    *of(
        "npu_agent/outputs/deviceplugin/session.py",
        "tests/outputs/deviceplugin/test_session.py",
        (
            "session: a socket that is removed goes unnoticed",
            "exists.publish):",
            "lambda _: None):",
        ),
    ),
    *of(
        "npu_agent/agent.py",
        "tests/test_agent.py",
        (
            "agent: the kubelet is asked as often while nobody holds anything",
            "            self.pod_resources.no_news = self.keeper.no_news\n",
            "            pass\n",
        ),
        (
            "agent: CDI specs are seldom looked after",
            "        if not by_cdi:  # the specs",
            "        if True:  # the specs",
        ),
    ),
    *of(
        "npu_agent/inventory/watch.py",
        "tests/inventory/test_inventory.py",
        (
            "watch: one that watches nothing any more does not say so",
            "            self.report()  # it can be forgotten now\n",
            "            pass\n",
        ),
        (
            "watch: a probe that changed nothing outlives another card",
            "self._settled == (found, card)",
            "self._settled and self._settled[0] == found",
        ),
        (
            "watch: a probe that changed nothing outlives one that failed",
            "if settles and course == before else None",
            "if settles and course == before else self._settled",
        ),
        (
            "watch: a probe of a card that was too hot changes nothing any more",
            "settles = found if not trouble and limit is None else None",
            "settles = found if not trouble else None",
        ),
        (
            "watch: a probe that changed nothing hides that the card cannot be identified",
            "if not trouble and limit is None and self",
            "if limit is None and self",
        ),
        (
            "watch: heat of a card that works is not read",
            "if not trouble and limit is None and self",
            "if not trouble and self",
        ),
        (
            "watch: a probe that changed nothing outlives a hang",
            "                    self._settled = None\n                    self.view",
            "                    self.view",
        ),
        (
            "watch: a probe that changed nothing hides a hang found meanwhile",
            "        with self.lock:  # all of it: meanwhile `check` may fence the card\n",
            "        with suppress():\n",
        ),
        (
            "watch: other intervals come into force after the ones before",
            "            if settings is not self._paced:\n",
            "            if self._paced is None:\n",
        ),
        (
            "watch: a probe under way sets the next one by the interval before",
            "if self._entry is entry and self._settings.value is settings:",
            "if self._entry is entry:",
        ),
        (
            "watch: a reading hides a hang found meanwhile",
            "                with self.lock:  # `check` may have fenced the card\n",
            "                with suppress():\n",
        ),
    ),
    *of(
        "npu_agent/vendors/furiosa/sysfs.py",
        "tests/vendors/furiosa/test_sysfs.py",
        (
            "sysfs: sensors are kept for good",
            "if kept == minute and all(",
            "if stamps and any(",
        ),
        (
            "sysfs: entries without nodes are never found again",
            "and time.monotonic() < self._scan_at:",
            "and self._scan_at:",
        ),
        (
            "sysfs: a scan may miss what comes at the very moment of the one before",
            "for at in nodes_at if _settled(at)]",
            "for at in nodes_at]",
        ),
        (
            "sysfs: nothing is kept after the clock was set back",
            "    return abs(time.time_ns() - changed) > _SETTLED\n",
            "    return time.time_ns() - changed > _SETTLED\n",
        ),
        (
            "sysfs: sensors are never kept",
            "self._sensors_at[address] = minute, stamps, files",
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
        "npu_agent/files.py",
        "tests/test_files.py",
        ("files: what was given up is put in place", "if not abandoned.is_set():", "if True:"),
        (
            "files: written though it is so already",
            "        if content(path, len(new) + 1, follow=False) == new:\n            return False\n",
            "        pass\n",
        ),
        (
            "files: what is not put in place is left",
            "        beside.unlink(missing_ok=True)\n",
            "        pass\n",
        ),
        ("files: no directory is made", "    if directory:\n", "    if False:\n"),
        ("files: a directory is made where none may be", "    if directory:\n", "    if True:\n"),
    ),
    *of(
        "npu_agent/kube/client.py",
        "tests/kube/test_apart.py",
        (
            "API: what is gone cannot be deleted",
            "            if error.kind is Kind.NOT_FOUND:\n                return False\n            raise\n        return True\n",
            "            raise\n        return True\n",
        ),
    ),
    *of(
        "npu_agent/kubelet/ledger.py",
        f"tests/kubelet/test_ledger.py {DRA}/test_claims.py {DEVICEPLUGIN}/test_publisher.py "
        f"{DEVICEPLUGIN}/test_exclusive.py",
        (
            "keeper: grants are not noted",
            "        self.states.publish(self._ledger.granted(resource, devices, self._clock()))\n",
            "        return\n",
        ),
        (
            "keeper: a grant does not ask the ledger",
            "kind, reason = Refusal.HELD, self._conflicts.against(itself, device)",
            "kind, reason = Refusal.HELD, None",
        ),
        (
            "keeper: two grants before an answer",
            "            self._conflicts.add(name, self._ledger.holds[name])\n",
            "            pass\n",
        ),
        (
            "keeper: a renumbered card is granted",
            "card.key == here.key and keys_of(card) == keys_of(here) for here",
            "True for here",
        ),
        (
            "keeper: the record is not read again at a takeover",
            "                    self.states.publish(ledger)\n",
            "",
        ),
        ("keeper: a new owner does not ask", "        await self._answer(_ANSWER)\n", ""),
        (
            "keeper: a standby agent that ends removes the record",
            "        if not self._owner:\n            return False\n        now",
            "        now",
        ),
        (
            "keeper: the record is removed under running Pods",
            "if held or starting or",
            "if starting or",
        ),
        (
            "keeper: the record is removed under Pods that start",
            "if held or starting or",
            "if held or",
        ),
        (
            "keeper: the record is removed without an answer",
            "unsure = answer.error or answer.asked_at < now",
            "unsure = answer.error",
        ),
        (
            "keeper: a second answer is not asked for",
            "            if self._ledger.doubtful:\n                self._pod_resources.ask_soon()\n",
            "",
        ),
        (
            "keeper: another one's record is not taken",
            "if not self._read or found not in (None, self._on_disk):",
            "if not self._read:",
        ),
        (
            "keeper: a record that cannot be read is none that is lost",
            "found is None or ledger.unsure",
            "found is None",
        ),
        (
            "keeper: a record that could not be written is not tried again",
            "and self._clock() < self._failed[1]:",
            "and self._failed[1]:",
        ),
        (
            "keeper: a directory that was wiped twice has what was prepared forgotten",
            "if not self._read or found not in (None, self._on_disk):",
            "if self._on_disk is None or found not in (None, self._on_disk):",
        ),
        (
            "keeper: a write that was given up never comes late",
            " and not self._late:",
            ":",
        ),
        (
            "keeper: after a write that was given up each one is repeated",
            "                self._late = False\n",
            "",
        ),
        (
            "keeper: a kubelet that was away knows all its Pods",
            "                self.states.publish(self._ledger.doubted(self._clock() + _RESTART))\n",
            "",
        ),
        (
            "keeper: what is not on disk counts as saved when the agent ends",
            "            raise OSError(self.why_not_owned)\n",
            "            return\n",
        ),
        (
            "keeper: granted while claims in use are not known",
            "            raise RefusalError(Refusal.UNFIT, UNRECORDED)\n",
            "            pass\n",
        ),
        (
            "keeper: claims in use and in no record are nobody's",
            "        if not self._lost:\n            return frozenset()\n",
            "        return frozenset()\n",
        ),
        (
            "keeper: one failure to write is for ever",
            "        self._failed = None  # it is tried now\n",
            "",
        ),
        (
            "keeper: an answer that failed ends holds",
            "if answer.error is None and answer.asked_at > self._answered_at:",
            "if answer.asked_at > self._answered_at:",
        ),
    ),
    *of(
        "npu_agent/outputs/deviceplugin/publisher.py",
        f"{DEVICEPLUGIN}/test_publisher.py",
        (
            "publisher: who holds what is not compared",
            "if (reason := unrecorded or conflicts.against((resource, device.id), device))",
            "if (reason := None)",
        ),
        (
            "publisher: what is offered is not in the record",
            "        self._keeper.offering(offered)\n",
            "",
        ),
        (
            "publisher: offered before it is on the disk",
            "                if not wrote:\n                    self._put(lists)\n"
            "                    break",
            "                self._put(lists)\n                break",
        ),
        (
            "publisher: offered before the first answer",
            "if not snapshot.complete or not self._keeper.asked.value:",
            "if not snapshot.complete:",
        ),
        (
            "publisher: a CDI spec that cannot be replaced withholds what the last good one has",
            "cdi.missing(specs, self._specs)",
            "cdi.missing(specs, {})",
        ),
        (
            "publisher: CDI specs forget what is granted while they are written",
            "before=self._published,",
            "before=self._decided,",
        ),
        (
            "publisher: CDI specs that were left behind stay although there are no cards",
            "(not owned and (cards or not self._by_cdi)):",
            "not owned:",
        ),
        (
            "publisher: devices leave the CDI specs while nobody knows who holds them",
            "if self._pod_resources.holdings.value.error is not None:",
            "if self._pod_resources.holdings.value.error == 0:",
        ),
        (
            "publisher: CDI specs are written although nobody wants CDI names",
            "for device in devices if self._by_cdi),",
            "for device in devices),",
        ),
        (
            "publisher: CDI specs of others are removed",
            "if self._by_cdi or spec == content:",
            "if spec:",
        ),
        (
            "publisher: an old CDI spec that cannot be removed is a problem",
            "if errors and not self._by_cdi:",
            "if errors and not errors:",
        ),
        (
            "publisher: CDI specs of a killed agent are forgotten",
            "self._published, self._looked, self._found = dict(self._specs), -math.inf, owned",
            "self._looked, self._found = -math.inf, owned",
        ),
        (
            "publisher: CDI specs are read before the node is ours, and never again",
            "if self._found is not owned:",
            "if self._found is None:",
        ),
        (
            "publisher: an agent that stands by writes the CDI specs",
            "if self._cdi_root is None or (not owned and (cards or not self._by_cdi)):",
            "if self._cdi_root is None:",
        ),
        (
            "publisher: CDI specs are removed under running Pods",
            "            if not await self._keeper.end():\n                return\n",
            "            await self._keeper.end()\n",
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
            "            for way in ways:\n                way.cancel()\n",
            "            for way in ways[:2]:\n                way.cancel()\n",
        ),
    ),
    *of(
        "npu_agent/outputs/deviceplugin/service.py",
        f"{DEVICEPLUGIN}/test_service.py",
        (
            "service: the ledger does not hear of a grant",
            "                await self._note(self._resource, [one for each in containers for one in each])\n",
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
        (
            "cdi: what is held leaves with the list",
            'or each["name"] in held)',
            "and not held)",
        ),
        ("cdi: hooks of others are taken over", " and entry == _node_entry(name, paths)", ""),
        (
            "cdi: what is held is what it was, and not what it is",
            'if each["name"] not in written and (held',
            "if (held",
        ),
    ),
    *of(
        "npu_agent/agent.py",
        "tests/test_agent.py -k wall_clock",
        (
            "clock: the start is by the wall clock",
            "self._started_at = time.monotonic()",
            "self._started_at = time.time()",
        ),
        (
            "clock: pages stay by the old one",
            "            self._ahead = ahead\n",
            "            pass\n",
        ),
        (
            "clock: times of day differ at each request",
            "- self._ahead) > _JUMP:",
            "- self._ahead) > 0:",
        ),
    ),
    *of(
        "npu_agent/inventory/watch.py",
        "tests/test_agent.py -k wall_clock",
        (
            "clock: health is by the wall clock",
            "course = health.step(before, verdict, settings.policy, time.monotonic())",
            "course = health.step(before, verdict, settings.policy, time.time())",
        ),
    ),
    *of(
        "npu_agent/outputs/events.py",
        "tests/outputs/test_events.py -k wall_clock",
        (
            "clock: Events are by the old one",
            "time.gmtime(time.time() - (_now() - at))",
            "time.gmtime(1_000_000.0 + at)",
        ),
    ),
    *of(
        "npu_agent/agent.py",
        "tests/test_agent.py -k no_answer_ever_lists",
        ("agent: grants are not noted", "note=self.keeper.grant_when_free,\n", ""),
    ),
    *of(
        "npu_agent/agent.py",
        "tests/test_agent.py -k deleted_by_force",
        ("agent: nobody looks for living Pods", "            Pods(directory, host_root),\n", ""),
        (
            "agent: cgroups of the container",
            "Pods(directory, host_root)",
            'Pods(directory, Path("/"))',
        ),
    ),
    *of(
        "npu_agent/kubelet/pods.py",
        "tests/kubelet/test_pods.py",
        ("pods: systemd's names are not known", '.replace("_", "-")', ""),
        ("pods: kubelets in a container", "elif depth < _DEEPEST:", "elif depth < 2:"),
        ("pods: a cgroup without processes", '"populated 1" in', '"populated" in'),
        (
            "pods: version 1 is not known",
            'if unified else self._cgroups / "pids"',
            "if unified or True else self._cgroups",
        ),
        ("pods: version 1 without processes", ".read_text()) > 0", ".read_text()) >= 0"),
        ("pods: found once, found for ever", "self._where.pop(uid, None)", "pass"),
        (
            "pods: a kernel that hangs",
            "            return wanted\n",
            "            return frozenset()\n",
        ),
        ("pods: one NUMA node", "found.get(name, frozenset()) | ", ""),
        ("pods: said again and again", "self._troubles.add(trouble)", "pass"),
        ("pods: a simulated host is in trouble", "if self._simulated.exists():", "if False:"),
    ),
    *of(
        "npu_agent/kubelet/podresources.py",
        "tests/kubelet/test_podresources.py",
        ("pods: notes are read each time", "            self._unnoted -= 1\n", ""),
        (
            "pods: notes are read once",
            "            self._unnoted = 2\n        if",
            "            self._unnoted = 1\n        if",
        ),
        (
            "pods: not after a grant",
            "        self._unnoted = 2\n        self._wanted_by",
            "        self._wanted_by",
        ),
        (
            "pods: not at the start",
            '        self._unnoted = 2\n        """For',
            '        self._unnoted = 0\n        """For',
        ),
        ("pods: forgotten with a failure", "                pods=before.pods,\n", ""),
        ("pods: dead with a failure", "                living=before.living,\n", ""),
    ),
    *of(
        "npu_agent/core/ledger.py",
        "tests/core/test_ledger.py",
        (
            "living: a Pod that is not listed keeps nothing",
            "ledger = ledger.outlived(living_on",
            "ledger.outlived(living_on",
        ),
        (
            "living: the next Pod is failed immediately",
            "(HOLDER_ENDS if living_on else SETTLED)",
            "SETTLED",
        ),
        (
            "living: everybody has time to end",
            "(HOLDER_ENDS if living_on else SETTLED)",
            "HOLDER_ENDS",
        ),
        ("living: for ever", "asked_at < one.since or (uid in living and uid not in back)", "True"),
        (
            "living: an older answer ends it",
            "asked_at < one.since or (uid in living",
            "(uid in living",
        ),
        (
            "living: although it is listed again",
            "(uid in living and uid not in back)",
            "uid in living",
        ),
        (
            "living: only the last Pod is known",
            "(hold.pod_uids if hold else frozenset()) | pods",
            "pods",
        ),
        (
            "living: what it had before is lost",
            "sorted({*before, *hold.footprints}, key=_order)",
            "sorted(hold.footprints, key=_order)",
        ),
        (
            "living: not in the record",
            "    if ending:\n        record",
            "    if False:\n        record",
        ),
        ("living: Pods not in the record", "sorted(pods.get((resource, device), ()))", "[]"),
        (
            "living: an old answer ends it after a restart",
            "{uid: replace(one, since=now) for",
            "{uid: one for",
        ),
        ("living: by which API is forgotten", 'by_claim=bool(one["byClaim"])', "by_claim=False"),
        ("living: by either API", "if prepared if one.by_claim else held:", "if True:"),
        ("living: not asked for again", "return bool(self.ending) or any(", "return any("),
        (
            "living: nobody looks whether it has ended",
            "return frozenset(self.ending).union(",
            "return frozenset().union(",
        ),
    ),
    *of(
        "npu_agent/kubelet/ledger.py",
        "tests/kubelet/test_ledger.py",
        (
            "living: a grant does not wait",
            "while self._outlived(devices) and now() < until:",
            "while False:",
        ),
        (
            "living: a grant waits for ever",
            "self._outlived(devices) and now() < until:",
            "self._outlived(devices):",
        ),
        (
            "living: a grant waits for any card",
            'return any(ending.against(("", ""), device) for device in devices)',
            "return bool(self._ledger.ending)",
        ),
        (
            "living: the kubelet's notes are not read",
            "self.states.publish(self._ledger.noted(noted))",
            "pass",
        ),
        (
            "living: they are not read without a record",
            "since=0.0, pod_uids=noted.get(name, _NONE))",
            "since=0.0)",
        ),
        (
            "living: whoever lives had each device",
            "ledger.outlived(living & hold.pod_uids",
            "ledger.outlived(living",
        ),
        (
            "living: nobody asks again",
            "            self._pod_resources.ask()\n            await asyncio.sleep(_LOOK_AGAIN)",
            "            await asyncio.sleep(_LOOK_AGAIN)",
        ),
        ("living: not logged", "            self._log_ending(before)\n", ""),
        ("living: its end is not logged", "            self._log_ending(ending)\n", ""),
    ),
    *of(
        "npu_agent/kubelet/ledger.py",
        "tests/kubelet/test_ledger.py",
        ("living: the record goes with the agent", " or answer.living", ""),
        (
            "living: the kubelet forgets, and so do we",
            "        self.states.publish(self._ledger.noted(noted))",
            "        pass",
        ),
    ),
    *of(
        "npu_agent/outputs/dra/claims.py",
        f"{DRA}/test_claims.py",
        (
            "living: a claim that is unprepared has ended",
            "        await self._keeper.outlive(uid)\n",
            "",
        ),
        (
            "living: the Pods of a claim are not known",
            "        pod_uids=claim.pod_uids,\n        joined",
            "        joined",
        ),
        ("living: nor after the record was lost", "            pod_uids=uids,\n", ""),
        (
            "living: nor those that share it",
            "                    uids = tuple(dict.fromkeys((*now.pod_uids, *found.pod_uids)))",
            "                    uids = now.pod_uids",
        ),
        (
            "living: nor those of an older agent",
            "using.issubset(claim.pods) and claim.pod_uids",
            "using.issubset(claim.pods)",
        ),
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
            "                offered=partial(_offered, socket_beside(directory)),\n                by_cdi",
            "                by_cdi",
        ),
        ("agent: losses are not reported", "kubelet_lost=self.keeper.kubelet_lost,\n", ""),
        (
            "agent: IDs are forgotten over a restart",
            "            known=ledger.cards,\n",
            "",
        ),
        ("agent: the publisher does not end", "await self.publisher.end()", "pass"),
    ),
    *of(
        "npu_agent/outputs/deviceplugin/publisher.py",
        "tests/test_agent.py -k disk_that_hangs",
        (
            "agent: a disk that hangs keeps the streams from their end",
            "_ENDING = 0.3",
            "_ENDING = 9.0",
        ),
    ),
    *of(
        "npu_agent/outputs/deviceplugin/publisher.py",
        f"{DEVICEPLUGIN}/test_publisher.py -k disk_that_hangs",
        (
            "publisher: what is granted while a disk hangs and the agent ends",
            "            self._keeper.close()\n",
            "            pass\n",
        ),
        (
            "publisher: the removal of a spec stops the loop",
            "await files.replace(path, None)",
            "path.unlink(missing_ok=True)",
        ),
    ),
    *of(
        "npu_agent/kubelet/ledger.py",
        f"{DEVICEPLUGIN}/test_publisher.py -k disk_that_hangs",
        (
            "keeper: what is granted after the end",
            "        if self._closed:\n",
            "        if False:\n",
        ),
        (
            "keeper: a node is owned after the end",
            "self._owner = not self._closed",
            "self._owner = True",
        ),
        (
            "keeper: the removal of the record stops the loop",
            "await files.replace(self._directory / RECORD, None)",
            "(self._directory / RECORD).unlink(missing_ok=True)",
        ),
    ),
    *of(
        "npu_agent/core/places.py",
        "tests/core/test_places.py",
        (
            "places: a card in both is left there",
            "card.wish is Wish.NEITHER or (card.listed and card.sliced)",
            "card.wish is Wish.NEITHER",
        ),
        (
            "places: listed while it may be in a slice",
            "        case Wish.PLUGIN if card.sliced:\n            return Place.LEAVING if card.by_claim else Place.NOWHERE\n",
            "",
        ),
        (
            "places: in a slice while it may be listed",
            "return Place.NOWHERE if card.listed else Place.SLICE",
            "return Place.SLICE",
        ),
        (
            "places: listed under a claim",
            "return Place.NOWHERE if card.by_claim else Place.PLUGIN",
            "return Place.PLUGIN",
        ),
    ),
    *of(
        "npu_agent/kubelet/places.py",
        "tests/test_agent_moves.py",
        (
            "places: the kubelet is not asked",
            "        if offered is None:\n",
            "        offered = offered or {}\n        if offered is None:\n",
        ),
        (
            "places: the Node's count does not matter",
            "if counts.get(resource, 0) > sum(",
            "if -1 > sum(",
        ),
        (
            "places: turns are followed at any speed",
            "                    await asyncio.sleep(wait)\n",
            "",
        ),
        (
            "places: claims of the device plugin's cards are prepared",
            "        if not here or self.now()",
            "        if True or self.now()",
        ),
        (
            "places: what is listed is not noted",
            "        self.listed.publish(known)\n\n    def refusal",
            "\n    def refusal",
        ),
    ),
    *of(
        "npu_agent/outputs/dra/driver.py",
        "tests/test_agent_moves.py",
        (
            "driver: no time for a claim that was just allocated",
            "if now - since[id_] >= _GRACE",
            "if now - since[id_] >= 0",
        ),
        (
            "driver: cards count as left before the API server says so",
            "self.slices.in_place.value == self.offered.value",
            "True",
        ),
        (
            "driver: a card that leaves has no taint",
            "replace(one, taints=(*one.taints, leaving))",
            "one",
        ),
        (
            "driver: cards stay for ever where slices cannot be seen",
            "return self.slices.no_access and not needed",
            "return False",
        ),
        (
            "driver: slices that cannot be seen count as deleted while the kubelet has us",
            "            while still_ours() and (self._registers or time.monotonic() < until):\n",
            "            while still_ours() and (self._serves or time.monotonic() < until):\n"
            "                if self._leaves_slices:\n"
            "                    await self._until_wiped(still_ours)\n",
        ),
        (
            "driver: slices that cannot be seen count as deleted before the kubelet deletes them",
            "if time.monotonic() - since >= _WIPED:",
            "if time.monotonic() - since >= 0:",
        ),
        (
            "driver: unregistered although the slices can be seen again",
            "while still_ours() and self._leaves_slices:",
            "while still_ours():",
        ),
        (
            "driver: gone before the last answer where slices cannot be seen",
            "or time.monotonic() < until):",
            "or (time.monotonic() < until and not self._leaves_slices)):",
        ),
    ),
    *of(
        "npu_agent/agent.py",
        "tests/test_agent_dra.py",
        (
            "agent DRA: whether auto is DRA does not reach the device plugin",
            "config, WORDS.families, node_name, auto=dra.available, possible",
            "config, WORDS.families, node_name, auto=False, possible",
        ),
        (
            "agent DRA: whether auto is DRA does not reach DRA",
            "families=offered_by(config, words.families, Wish.DRA, node_name, auto=dra.available),",
            "families=offered_by(config, words.families, Wish.DRA, node_name, auto=False),",
        ),
        (
            "agent DRA: disabled cards are offered",
            "        disabled=frozenset(name.lower() for name in disabled_for(config, node_name)),\n",
            "",
        ),
        (
            "agent DRA: disabledDevices of other nodes count",
            "disabled=frozenset(name.lower() for name in disabled_for(config, node_name)),",
            "disabled=frozenset(name.lower() for name in disabled_for(config, 'x')),",
        ),
        (
            "agent DRA: deviceNames index has no effect",
            'by_index=config.dra.device_names == "index",',
            "by_index=False,",
        ),
        ("agent DRA: evict has no effect", "evict=config.health.evict,", "evict=False,"),
        (
            "agent DRA: the API server is asked under every config",
            'return asks_for(config, "auto", node_name), asks_for(config, "dra", node_name)',
            "return True, True",
        ),
        (
            "agent DRA: auto without a Node name waits for ever",
            "            if self._node_name is None or not (auto or dra):\n",
            "            if not (auto or dra):\n",
        ),
        (
            "agent DRA: auto asks once",
            "                await set_within(changed, pause.next())\n                continue\n",
            "                await changed.wait()\n",
        ),
        (
            "agent DRA: an API server that is away means device plugin",
            "                await set_within(changed, pause.next())\n                continue\n",
            "                self._dra.publish(_Dra(available=False))\n                continue\n",
        ),
        (
            "agent DRA: auto changes its mind",
            "            available = known.available\n",
            "            available = None\n",
        ),
        (
            "agent DRA: what is impossible is so for ever",
            "                await set_within(changed, _ASK_AGAIN)\n",
            "                await changed.wait()\n",
        ),
        (
            "agent DRA: what is impossible is not said",
            "        impossible=dra.impossible,\n",
            "",
        ),
        (
            "agent DRA: the device plugin does not follow what is found",
            "wanted=configs.map_with(self._dra, partial(_wishes, node_name)),",
            "wanted=configs.map(lambda c: _wishes(node_name, c, self._dra.value)),",
        ),
        (
            "agent DRA: a resource by DRA alone has to be registered",
            "                if each.status.value.resource in served\n",
            "",
        ),
        (
            "agent DRA: a driver that nobody needs has to be registered",
            "                for each in self.drivers\n                if each.needed\n",
            "                for each in self.drivers\n",
        ),
        (
            "agent DRA: the state has no prepared claims",
            "                    claims=each.prepared(),\n",
            "",
        ),
        (
            "agent DRA: drivers are cancelled with the rest, not before",
            "for task in (*sessions, *drivers, *servers):",
            "for task in (*sessions, *servers):",
        ),
        (
            "agent DRA: an ownership of its own",
            "                ownership=ownership,\n                keeper",
            "                ownership=Ownership(directory.parent),\n                keeper",
        ),
        (
            "agent DRA: sockets beside the device plugin's",
            "kubelet_root=directory.parent,",
            "kubelet_root=directory,",
        ),
        (
            "agent DRA: CDI specs on another root",
            "                api=self._api,\n                cdi_root=host_root / cdi.DIRECTORY,",
            "                api=self._api,\n                cdi_root=Path('/tmp') / cdi.DIRECTORY,",
        ),
    ),
    *of(
        "npu_agent/kubelet/ledger.py",
        "tests/kubelet/test_ledger.py",
        (
            "keeper claims: the record is removed under prepared claims",
            "kept = ledger.prepared or ",
            "kept = ",
        ),
    ),
    *of(
        "npu_agent/outputs/deviceplugin/publisher.py",
        f"{DEVICEPLUGIN}/test_publisher.py",
        (
            "publisher: a claim that is prepared is no reason to publish",
            "            self._keeper.prepared,\n            self._keeper.unrecorded,\n",
            "            self._keeper.unrecorded,\n",
        ),
    ),
    *of(
        "npu_agent/outputs/dra/driver.py",
        f"{DRA}/test_driver.py tests/test_agent_dra.py tests/test_agent_without_dra.py",
        (
            "driver: a prepared claim is not served without cards",
            "            return bool(self.prepared())\n        return bool(self.prepared()) or ",
            "            return False\n        return ",
        ),
        (
            "driver: served for ever",
            "while still_ours() and (self._registers or time.monotonic() < until):",
            "while still_ours():",
        ),
        (
            "driver: gone before the last answer",
            "while still_ours() and (self._registers or time.monotonic() < until):",
            "while still_ours() and self._registers:",
        ),
        (
            "driver: dead sockets stay",
            "                        sweep(self._dra.driver, self._kubelet_root)\n",
            "",
        ),
        (
            "driver: the ledger is not renewed",
            "                        await self._keeper.renew()\n",
            "",
        ),
        (
            "driver: a part that fails is gone",
            "            task.result()\n",
            "            pass\n",
        ),
        (
            "driver: a kubelet that has closed its stream has us",
            "            elif streamed and not health.streams.value:\n",
            "            elif False:\n",
        ),
        (
            "driver: served where it is impossible",
            "return self._in_use or (self.needed and not self._wanted.value.impossible)",
            "return self.needed",
        ),
        (
            "driver: the node is not owned",
            "async with self._ownership.held(self._standby) as still_ours:",
            "async with contextlib.nullcontext(lambda: True) as still_ours:",
        ),
        (
            "driver: one failure ends it",
            "                except OSError as error:\n                    self._trouble(str(error))\n",
            "                except OSError as error:\n                    self._trouble(str(error))\n                    return\n",
        ),
        (
            "driver: no Node name is no trouble",
            "            elif self._node_name is None:\n",
            "            elif False:\n",
        ),
        (
            "driver: the pool is published in parts",
            "if not self.needed or not snapshot.complete or not keeper.asked.value:",
            "if not self.needed or not keeper.asked.value:",
        ),
        (
            "driver: the pool does not follow the ledger",
            "*(keeper.holds, keeper.prepared, keeper.ending, keeper.asked, keeper.unrecorded),",
            "*(keeper.prepared, keeper.ending, keeper.asked, keeper.unrecorded),",
        ),
        (
            "driver: what containers hold has no taint",
            "            held=self._keeper.held_by_containers(seen),\n",
            "",
        ),
        (
            "driver: a disabled card cannot be prepared",
            "                        families=families,\n",
            "                        families=families,\n                        disabled=wanted.disabled,\n",
        ),
        (
            "driver: a card of another family cannot be prepared",
            "families = self._vendor_families",
            "families = wanted.families",
        ),
        ("driver: evict has no effect", "            evict=wanted.evict,\n", ""),
        (
            "driver: claims are never swept",
            "            asyncio.create_task(self._sweep_claims()),\n",
            "",
        ),
        (
            "driver: slices are not published",
            "            asyncio.create_task(self.slices.run()),\n",
            "",
        ),
        (
            "driver: a lost record is not rebuilt",
            "await self.claims.rebuild()  # before anything is swept or prepared\n",
            "pass\n",
        ),
        (
            "driver: health stops at the first list",
            "            asyncio.create_task(self._report(served)),\n",
            "",
        ),
        (
            "driver: a socket that is removed is not missed",
            "                if not endpoint.exists():\n",
            "                if False:\n",
        ),
        (
            "driver: slices are not listed after a restart of the kubelet",
            "                self.slices.ask_now()  #",
            "                pass  #",
        ),
        (
            "driver: a full disk delays all cards",
            "while self._notes() and not failed:",
            "while self._notes():",
        ),
        (
            "driver: a card that a full disk does not know is in a slice",
            "if place.sliced} - self._unsaved",
            "if place.sliced}",
        ),
        (
            "driver: a full disk is not tried again",
            "                self._again.publish(self._again.value + 1)\n",
            "",
        ),
        (
            "driver: a full disk empties the slices",
            "            if placed or not self._unsaved or self.offered",
            "            if True or self.offered",
        ),
        (
            "driver: a full disk is no trouble",
            "            elif self._unwritten.value:\n",
            "            elif False:\n",
        ),
        (
            "driver: a full disk is trouble for ever",
            '                self._unwritten.publish("")\n',
            "                pass\n",
        ),
        (
            "driver: a restart of the kubelet is not noticed",
            "                    self._keeper.kubelet_lost()\n",
            "",
        ),
        (
            "driver: the first registration is a restart",
            "                if asked:\n",
            "                if True:\n",
        ),
        (
            "driver: a refusal of the kubelet is no trouble",
            '                self._trouble(f"the kubelet refuses: {now.error}")\n',
            "                pass\n",
        ),
        (
            "driver: a standby agent is not told from one that registers",
            '            self._say(SessionPhase.STANDBY, f"served by {owner}")\n',
            "            self._say(SessionPhase.REGISTERING)\n",
        ),
        (
            "driver: claims of other drivers are ours",
            "return tuple(one for one in claims if one.driver == self._dra.driver)",
            "return tuple(claims)",
        ),
        (
            "driver: the endpoint stays open at the end",
            "            await endpoint.close()\n",
            "            pass\n",
        ),
    ),
    *of(
        "npu_agent/outputs/dra/claims.py",
        f"{DRA}/test_claims.py",
        (
            "claims: one that was unprepared before it was found is prepared",
            "if found.uid in self._unprepared or ",
            "if ",
        ),
        (
            "claims: one that is deallocated is prepared for ever",
            "return found.uid != claim.uid or not held <= {one.device for one in found.results}",
            "return found.uid != claim.uid",
        ),
        (
            "claims: prepared in the ledger after the answer only",
            "            self._keeper.prepare(_prepared(claim, found, self._dra.driver, joined=joined), own)\n",
            "",
        ),
        (
            "claims: the record is not saved before the answer",
            "                await self._keeper.saved()\n            except OSError:\n                if before",
            "            except OSError:\n                if before",
        ),
        (
            "claims: no CDI spec is written",
            "                await files.replace(self._spec_of(claim.uid), spec)\n",
            "",
        ),
        (
            "claims: the record before the CDI spec",
            "                await files.replace(self._spec_of(claim.uid), spec)\n"
            "                await self._keeper.saved()\n",
            "                await self._keeper.saved()\n"
            "                await files.replace(self._spec_of(claim.uid), spec)\n",
        ),
        (
            "claims: no roll-back",
            "                    await self._end(claim.uid)\n                raise",
            "                    pass\n                raise",
        ),
        (
            "claims: a failure forgets what runs",
            "                if before is not None:  # its Pods still run",
            "                if False:",
        ),
        (
            "claims: the same cores twice",
            "            _check_overlap(claim, found)\n",
            "",
        ),
        (
            "claims: administrators overlap",
            "    own = [(result, device) for result, device in found if not result.admin]\n",
            "    own = list(found)\n",
        ),
        (
            "claims: administrators hold cores",
            "own = [device for result, device in found if not result.admin]",
            "own = [device for result, device in found]",
        ),
        (
            "claims: administrators are not remembered as such",
            "                admin=result.admin,\n                footprint",
            "                footprint",
        ),
        (
            "claims: the holder is not waited for",
            "if error.kind is not Refusal.HELD:",
            "if True:",
        ),
        (
            "claims: what no holder changes is waited for",
            "if error.kind is not Refusal.HELD:",
            "if False:",
        ),
        ("claims: waits without asking the kubelet", "                self._keeper.ask()\n", ""),
        ("claims: waits for ever", "asyncio.timeout_at(until)", "asyncio.timeout_at(None)"),
        ("claims: the UID is not compared", "if claim.uid != ref.uid:", "if False:"),
        ("claims: not allocated", "if not claim.allocated:", "if False:"),
        ("claims: no device of ours", "if not claim.results:", "if False:"),
        ("claims: reserved for nobody", "if not claim.reserved_for:", "if False:"),
        (
            "claims: another pool's device of the same name",
            "        if result.pool != self._pool:\n",
            "        if False:\n",
        ),
        (
            "claims: an unprepare meanwhile is not noticed",
            "            if began <= self._unprepared.get(claim.uid, 0.0):\n",
            "            if False:\n",
        ),
        (
            "claims: a claim is never prepared again once it ended",
            "            if began <= self._unprepared.get(claim.uid, 0.0):\n",
            "            if claim.uid in self._unprepared:\n",
        ),
        (
            "claims: sick cards are prepared",
            "                    self._check_health(result, device)\n",
            "                    pass\n",
        ),
        (
            "claims: a card that falls sick is not prepared again",
            "            if before is None:\n                for result",
            "            if True:\n                for result",
        ),
        (
            "claims: tolerations do not count",
            'if device.healthy or result.admin or result.tolerates(f"{self._dra.driver}/unhealthy"):',
            "if device.healthy or result.admin:",
        ),
        (
            "claims: administrators get no sick card",
            'if device.healthy or result.admin or result.tolerates(f"{self._dra.driver}/unhealthy"):',
            'if device.healthy or result.tolerates(f"{self._dra.driver}/unhealthy"):',
        ),
        (
            "claims: the API server decides about what is prepared",
            "            if known is None or error.kind is Kind.NOT_FOUND:\n",
            "            if True:\n",
        ),
        (
            "claims: a claim that is gone is prepared again",
            "            if known is None or error.kind is Kind.NOT_FOUND:\n",
            "            if known is None:\n",
        ),
        (
            "claims: changes come together",
            "        async with self._changing:\n            if began <=",
            "        async with contextlib.nullcontext():\n            if began <=",
        ),
        (
            "claims: a call that is given up ends half way",
            "return await asyncio.shield(task)",
            "return await task",
        ),
        (
            "claims: not waited until it is known who holds what",
            "            await self._ready()\n",
            "",
        ),
        (
            "claims: unprepared without an owner",
            "            if not self._keeper.owned:\n                return False\n",
            "",
        ),
        (
            "claims: unprepare does not save",
            "                await self._keeper.saved()\n            except OSError:  # logged",
            "                pass\n            except OSError:  # logged",
        ),
        (
            "claims: unprepare fails with the disk",
            "return self._keeper.owned\n            return True",
            "return False\n            return True",
        ),
        (
            "claims: a rebuilt claim without a UID is not unprepared",
            "                self._keeper.unprepare(nameless)\n",
            "",
        ),
        (
            "claims: a rebuilt claim keeps its name for a UID",
            "            self._keeper.unprepare(nameless.uid)\n",
            "            pass\n",
        ),
        (
            "claims: a lost record is never rebuilt",
            "        if not self._keeper.lost or in_use is None:\n            return\n",
            "        return\n",
        ),
        (
            "claims: claims of other drivers are rebuilt",
            "if use.driver == self._dra.driver and claim not in known:",
            "if claim not in known:",
        ),
        (
            "claims: what the record has is rebuilt as well",
            "        if not self._keeper.lost or in_use is None:\n            return\n",
            "        if in_use is None:\n            return\n",
        ),
        (
            "claims: swept after the first look",
            "if claim.uid in orphans and not self._used(claim):",
            "if not self._used(claim):",
        ),
        (
            "claims: used claims are swept",
            "            if self._used(claim) or not await self._gone(claim):\n",
            "            if not await self._gone(claim):\n",
        ),
        (
            "claims: existing claims are swept",
            "            if self._used(claim) or not await self._gone(claim):\n",
            "            if self._used(claim):\n",
        ),
        (
            "claims: used again between two sweeps",
            "if claim.uid in orphans and not self._used(claim):",
            "if claim.uid in orphans:",
        ),
        (
            "claims: an error of the API server ends claims",
            "            return error.kind is Kind.NOT_FOUND\n",
            "            return True\n",
        ),
        (
            "claims: a claim of the same name keeps one alive",
            "return found.uid != claim.uid or not held",
            "return not held",
        ),
        (
            "claims: a silent kubelet uses nothing",
            "return uses is None or any(",
            "return uses is not None and any(",
        ),
        (
            "claims: an orphan is one for ever",
            "orphans, self._orphans = self._orphans, set()",
            "orphans = self._orphans",
        ),
        (
            "claims: specs of claims that ended stay",
            "            await files.replace(path, None)\n\n",
            "            pass\n\n",
        ),
        (
            "claims: a spec that somebody removed stays away",
            "                        await self._write_again(uid)\n",
            "                        pass\n",
        ),
        (
            "claims: specs of prepared claims are swept",
            "for path in there - {self._spec_of(uid) for uid in self._keeper.prepared.value}:",
            "for path in there:",
        ),
        (
            "claims: a spec is written with other nodes than were granted",
            "        if now.devices != known.devices:\n",
            "        if False:\n",
        ),
        (
            "claims: a claim of the same name keeps one that is gone",
            "and (not devices or use.device in devices)",
            "",
        ),
        (
            "claims: what is unprepared as the agent ends is said to be done",
            "return self._keeper.owned\n            return True",
            "return True\n            return True",
        ),
        (
            "claims: each request of a container has its own variables",
            "environment=grant(by_container[_container(request, joined=joined)]).environment,",
            "environment=grant(devices).environment,",
        ),
        (
            "claims: all requests share the devices",
            "nodes=grant(devices).nodes,",
            "nodes=grant(by_container[_container(request, joined=joined)]).nodes,",
        ),
        (
            "claims: a container of several has the variables of all",
            "return all(len(of_pod) == 1 for of_pod in containers)",
            "return True",
        ),
        (
            "claims: a kubelet that has just started takes variables away",
            "return known is not None and known.joined",
            "return False",
        ),
        (
            "claims: one result counts for all",
            "            for result, _ in found\n        )",
            "            for result, _ in found[:1]\n        )",
        ),
        (
            "claims: failures count as prepared",
            '_Outcome("failed", "")',
            '_Outcome("prepared", "")',
        ),
        (
            "claims: a text in a refused claim is no refusal",
            '            return _Outcome("refused", str(error))\n',
            '            return _Outcome("failed", str(error))\n',
        ),
    ),
    *of(
        "npu_agent/core/claim.py",
        f"{DRA}/test_claims.py",
        (
            "claim: results of every driver",
            'if one.get("driver") == driver:',
            "if True:",
        ),
        (
            "claim: requests with their alternatives",
            '_text(one, "request").partition("/")[0]',
            '_text(one, "request")',
        ),
        (
            "claim: a wish to be administrator is enough",
            'admin=one.get("adminAccess") is True,',
            'admin="adminAccess" in one,',
        ),
        (
            "claim: only named taints are tolerated",
            'return key in self.tolerated or "" in self.tolerated',
            "return key in self.tolerated",
        ),
    ),
    *of(
        "npu_agent/outputs/dra/endpoint.py",
        f"{DRA}/test_endpoint.py",
        (
            "endpoint: found before it listens",
            "        await self._service.listen()\n        try:\n"
            "            await self._registration.listen()\n",
            "        await self._registration.listen()\n        try:\n"
            "            await self._service.listen()\n",
        ),
        (
            "endpoint: a start that fails leaves a socket",
            "        except BaseException:\n            await self._service.shutdown()\n",
            "        except BaseException:\n",
        ),
        (
            "endpoint: deregistered last",
            "            await self._registration.shutdown()\n            await drained",
            "            await drained",
        ),
        (
            "endpoint: one socket is enough",
            "return self._service.exists() and self._registration.exists()",
            "return self._service.exists()",
        ),
        (
            "endpoint: names are the Pod's alone",
            'unique = f"{instance}-{secrets.token_hex(2)}"',
            'unique = f"{instance}-0000"',
        ),
        (
            "endpoint: everybody may look into the directory",
            "mkdir(mode=0o750, parents=True, exist_ok=True)",
            "mkdir(mode=0o755, parents=True, exist_ok=True)",
        ),
        (
            "endpoint: long paths fail in the kernel",
            "            if length > SOCKET_PATH_MAX:\n",
            "            if length > 9999:\n",
        ),
        (
            "endpoint: a missing registry is made",
            "        if not registry.is_dir():\n",
            "        if registry.mkdir(exist_ok=True):\n",
        ),
        (
            "endpoint: living sockets are swept",
            "path.is_socket() and not _served(path):",
            "path.is_socket():",
        ),
        (
            "endpoint: a busy socket is a dead one",
            "        except OSError:\n            return True\n    return True",
            "        except OSError:\n            return False\n    return True",
        ),
        (
            "endpoint: sockets of other drivers are swept",
            'rf"{re.escape(driver)}-{_INSTANCE}',
            'rf".*-{_INSTANCE}',
        ),
        (
            "endpoint: a relative path",
            "kubelet_root.absolute() / PLUGINS",
            "kubelet_root / PLUGINS",
        ),
    ),
    *of(
        "npu_agent/outputs/dra/service.py",
        f"{DRA}/test_service.py",
        (
            "DRA service: the oldest version first",
            "supported_versions=list(SERVICES),",
            "supported_versions=list(reversed(SERVICES)),",
        ),
        (
            "DRA service: a claim without an answer is prepared",
            "outcome := found.get(uid, missing)",
            'outcome := found.get(uid, "")',
        ),
        (
            "DRA service: an error without words",
            '            uid: ("no reason given" if (outcome := found.get(uid, missing)) == "" else outcome)\n',
            "            uid: found.get(uid, missing)\n",
        ),
        (
            "DRA service: two claims with one UID",
            "        if refs.setdefault(ref.uid, ref) != ref:\n",
            "        if refs.setdefault(ref.uid, ref) is None:\n",
        ),
        (
            "DRA service: no deadline",
            "async with asyncio.timeout(self._deadline) as limit:",
            "async with asyncio.timeout(None) as limit:",
        ),
        (
            "DRA service: unknown health is none",
            "health=_HEALTHY if one.device.healthy else _UNHEALTHY,",
            "health=_HEALTHY,",
        ),
        (
            "DRA service: the time of the list and not of the change",
            "now if changed else since",
            "now",
        ),
        (
            "DRA service: a change between two lists is missed",
            "changed = self._devices.changed  # before the list is read: no change is missed",
            "changed = asyncio.Event()",
        ),
        (
            "DRA service: no heartbeat",
            "asyncio.timeout(until_tick(self._heartbeat))",
            "asyncio.timeout(None)",
        ),
        (
            "DRA service: streams are not counted down",
            "            self.streams.publish(self.streams.value - 1)\n",
            "            pass\n",
        ),
        (
            "DRA service: half a character",
            '[:most].decode(errors="ignore")',
            '[:most].decode(errors="replace")',
        ),
    ),
    *of(
        "npu_agent/outputs/dra/publisher.py",
        f"{DRA}/test_publisher.py",
        (
            "slices: a write without an answer has changed nothing",
            "                self.ask_now()  # it may have taken effect all the same\n",
            "",
        ),
        (
            "slices: an empty pool before the real one",
            "if self._live.value is None or self._devices.value is None:",
            "if self._live.value is None:",
        ),
        (
            "slices: written before there was a listing",
            "if self._live.value is None or self._devices.value is None:",
            "if self._devices.value is None:",
        ),
        (
            "slices: a question is not answered by a listing",
            "            await self._list()\n            self._answered = asked\n",
            "            self._answered = asked\n",
        ),
        (
            "slices: a Node that was created again is not noticed",
            "if self._uid is None or names - self._live.value.keys():",
            "if self._uid is None:",
        ),
        (
            "slices: sick cards are offered without taints",
            "devices = tuple(device for device in devices if not device.taints)",
            "devices = tuple(devices)",
        ),
        (
            "slices: written without end where a field is dropped",
            "return sent if sent and reply and not slices.differs(live, reply) else live",
            "return live",
        ),
        (
            "slices: a taint's time is not kept",
            "            sent = slices.keeping_times(wanted, before)\n",
            "            sent = dict(wanted)\n",
        ),
        (
            "slices: an old event undoes a new answer",
            "        if name in live and _version(live[name]) > _version(found):\n",
            "        if False:\n",
        ),
        (
            "slices: a listing undoes a newer answer",
            "self._note_live({**listing.slices, **known})",
            "self._note_live({**listing.slices})",
        ),
        (
            "slices: deletions are not seen",
            'gone=event["type"] == "DELETED"',
            "gone=False",
        ),
        (
            "slices: fights without pauses",
            "                await asyncio.sleep(gap.next())\n",
            "                pass\n",
        ),
        (
            "slices: a refusal is repeated without a pause",
            "                await asyncio.sleep(retry.next(error))\n            else:",
            "                pass\n            else:",
        ),
        (
            "slices: the server's wish to wait is not granted",
            "return max(self._pause.next(), (error and error.retry_after) or 0.0)",
            "return self._pause.next()",
        ),
        (
            "slices: trouble stays after it is over",
            '                retry.reset()\n                self._works("write")\n',
            "                retry.reset()\n",
        ),
        (
            "slices: published although a write failed",
            "                self.state.publish(replace(self.state.value, published=False))\n",
            "",
        ),
        (
            "slices: another API server still drops fields",
            "                    self._forget_dropped()\n",
            "                    pass\n",
        ),
        (
            "slices: an old version is trouble",
            'if doing == "list" or not (broken or error.status == 410):',
            'if doing == "list" or not broken:',
        ),
        (
            "slices: a watch that ends is repeated without a pause",
            "            await asyncio.sleep(retry.next(error))\n\n    async def _watch",
            "\n    async def _watch",
        ),
        (
            "slices: a watch is for ever",
            "seconds = _RELIST * random.uniform(0.8, 1.2)",
            "seconds = 1e6 * random.uniform(0.8, 1.2)",
        ),
    ),
    *of(
        "npu_agent/outputs/dra/slices.py",
        f"{DRA}/test_slices.py",
        ("slices: more devices than may be tainted", "_PER_SLICE = 64", "_PER_SLICE = 128"),
        (
            "slices: several calls in one generation",
            "return found if len(found.delete) + len(found.apply) < 2 else of(present + 1)",
            "return found",
        ),
        (
            "slices: every change is a generation",
            "return found if len(found.delete) + len(found.apply) < 2 else of(present + 1)",
            "return found if not (found.delete or found.apply) else of(present + 1)",
        ),
        (
            "slices: the generation starts again",
            "    present = newest(live, generation)\n",
            "    present = generation\n",
        ),
        (
            "slices: the owner is not compared",
            "or any(\n        owner not in owners for owner in needed\n    )",
            "or any(())",
        ),
        (
            "slices: the time of a taint is a difference",
            'if key != "timeAdded"}',
            "}",
        ),
        (
            "slices: a bool is an int",
            '            return {"bool": value}',
            '            return {"int": value}',
        ),
        (
            "slices: leftovers stay",
            "delete=tuple(sorted(live.keys() - names)),",
            "delete=(),",
        ),
        (
            "slices: a device that moved gets another time",
            'since.get((device["name"], *_what(taint)))',
            'since.get((wanted["metadata"]["name"], *_what(taint)))',
        ),
        (
            "slices: another effect keeps the time",
            'for key in ("key", "effect", "value"))',
            'for key in ("key", "value"))',
        ),
    ),
    *of(
        "npu_agent/core/pool.py",
        "tests/core/test_pool.py",
        ("pool: all families", " if state.card.family in families]", "]"),
        (
            "pool: two cards with one name",
            "        if seen[name] == 1 and len(name)",
            "        if len(name)",
        ),
        (
            "pool: names that are too long",
            "if seen[name] == 1 and len(name) <= _LONGEST_NAME and",
            "if seen[name] == 1 and",
        ),
        (
            "pool: two families with one number",
            "        if seen[state.card.name] == 1\n",
            "        if seen[state.card.name]\n",
        ),
        (
            "pool: the effects are swapped",
            "Effect.NO_EXECUTE if evict else Effect.NO_SCHEDULE",
            "Effect.NO_SCHEDULE if evict else Effect.NO_EXECUTE",
        ),
        ("pool: sick cards have no taint", "    if not device.healthy:\n", "    if False:\n"),
        (
            "pool: Pods on a held card are evicted",
            'key=f"{driver}/held", effect=Effect.NO_SCHEDULE',
            'key=f"{driver}/held", effect=Effect.NO_EXECUTE',
        ),
        ("pool: held cards have no taint", "    if held:\n", "    if False:\n"),
    ),
    *of(
        "npu_agent/core/ledger.py",
        f"tests/core/test_ledger.py tests/kubelet/test_ledger.py {DRA}/test_claims.py "
        f"{DEVICEPLUGIN}/test_exclusive.py",
        (
            "ledger claims: claims conflict with nothing",
            "        for claim in self.prepared.values() if prepared else ():\n",
            "        for claim in ():\n",
        ),
        (
            "ledger claims: claims are held against the pool",
            "if not one.admin and one.device not in without",
            "if not one.admin",
        ),
        (
            "ledger claims: administrators hold cores",
            "if not one.admin and one.device not in without",
            "if one.device not in without",
        ),
        (
            "ledger claims: an administrator's claim may hold anything",
            "        if not footprints:\n            return None\n",
            "",
        ),
        (
            "ledger claims: the record has none",
            "for _, claim in sorted(prepared.items())\n",
            "for _, claim in sorted(prepared.items())[:0]\n",
        ),
        (
            "ledger claims: the record is not read",
            "prepared={**found.prepared, **self.prepared},",
            "prepared={**self.prepared},",
        ),
        (
            "ledger claims: an old record undoes what was prepared since",
            "prepared={**found.prepared, **self.prepared},",
            "prepared={**self.prepared, **found.prepared},",
        ),
        (
            "ledger claims: records of the version before are damaged",
            "_READABLE = (1, 2)",
            "_READABLE = (2,)",
        ),
        (
            "ledger claims: administrators forget that over a restart",
            'admin=bool(one["admin"]),',
            "admin=False,",
        ),
        (
            "ledger claims: administrators are shown as holders",
            "best = None if device.admin else _best([device.footprint], present)",
            "best = _best([device.footprint], present)",
        ),
        (
            "ledger claims: every container has every device",
            '([""] if not names or (several and len(names) > 1) else sorted(names))',
            '([""] if not names else sorted(names))',
        ),
        (
            "ledger: a restart of the kubelet is nothing",
            "name: replace(hold, missed=None, kept_until=max(hold.kept_until, until))",
            "name: hold",
        ),
    ),
    *of(
        "npu_agent/kubelet/ledger.py",
        f"{DRA}/test_claims.py {DEVICEPLUGIN}/test_publisher.py {DEVICEPLUGIN}/test_exclusive.py",
        (
            "keeper claims: prepared without an owner",
            "            if not self._owner:\n                raise RefusalError(",
            "            if False:\n                raise RefusalError(",
        ),
        (
            "keeper claims: nobody asks the ledger",
            "            self._check((CLAIM, claim.uid), device)\n",
            "            pass\n",
        ),
        (
            "keeper claims: a change is decided by the state before",
            "        self._conflicts = ledger.conflicts(self._cards())\n\n    def _cards",
            "\n    def _cards",
        ),
        (
            "keeper claims: a failed write is no error",
            "            raise OSError(self._trouble)\n",
            "            return\n",
        ),
        (
            "keeper claims: an answer that failed uses nothing",
            "return None if answer.error or not answer.asked_at else answer.claim_uses",
            "return answer.claim_uses",
        ),
        (
            "keeper claims: a damaged record is not lost",
            "return self._lost or self._ledger.unsure",
            "return self._lost",
        ),
        (
            "keeper claims: no record is not lost",
            "return self._lost or self._ledger.unsure",
            "return self._ledger.unsure",
        ),
    ),
    *of(
        "npu_agent/kube/client.py",
        "tests/kube/test_client.py tests/kube/test_apart.py",
        (
            "client: the API server is accused of a login program that hangs",
            "        if self._session is None:\n            return attempt",
            "        if False:\n            return attempt",
        ),
        (
            "client: no deadline for waiting",
            "            async with asyncio.timeout(self._deadline), self._calling:\n",
            "            async with self._calling, asyncio.timeout(self._deadline):\n",
        ),
        (
            "client: calls apart wait for each other",
            "async with asyncio.timeout(seconds), self._apart:",
            "async with asyncio.timeout(seconds), self._calling:",
        ),
        (
            "client: a deadline that is given has no effect",
            "seconds = self._deadline if deadline is None else deadline",
            "seconds = self._deadline",
        ),
        (
            "client: a 401 is final",
            "            if answer.status == 401:\n                # The token",
            "            if False:\n                # The token",
        ),
        (
            "client: whoever gets a 401 closes the others' connection",
            "        if session is self._session:\n            self._renewed = session\n            await self.close()",
            "        self._renewed = session\n        await self.close()",
        ),
        (
            "client: what is cut short for new credentials fails",
            "cut = session is self._renewed",
            "cut = False",
        ),
        (
            "client: a PATCH that is dropped fails",
            'if again and (cut or (request.method == "PATCH" and _dropped(error))):',
            "if again and cut:",
        ),
        (
            "client: every call is repeated",
            'if again and (cut or (request.method == "PATCH" and _dropped(error))):',
            "if again and (cut or _dropped(error)):",
        ),
        (
            "client: repeated without end",
            "                    again = False\n                    continue",
            "                    continue",
        ),
        (
            "client: an address that does not answer is kept",
            "                    await self._renew(session)\n                raise failure",
            "                    pass\n                raise failure",
        ),
        (
            "client: an address that never answers is kept",
            "        self._unanswered = True\n",
            "",
        ),
        (
            "client: a hang cuts the watches",
            "        if replace(found, authorization=None) == replace(known, authorization=None):\n",
            "        if False:\n",
        ),
        (
            "client: two connections at the start",
            "        async with self._connecting:\n            return await self._connect()",
            "        return await self._connect()",
        ),
        (
            "client: the token is read once",
            "time.monotonic() - self._token_read_at >= _REREAD:",
            "False:",
        ),
        (
            "client: a token that cannot be read ends the calls",
            "            with contextlib.suppress(CredentialsError):\n                token",
            "            with contextlib.nullcontext():\n                token",
        ),
        (
            "client: proxies of the environment count",
            "                trust_env=False,\n",
            "                trust_env=True,\n",
        ),
        (
            "client: the proxy's password is in messages",
            'proxy=found.proxy and found.proxy.rpartition("://")[2].rpartition("@")[2],',
            "proxy=found.proxy,",
        ),
        (
            "client: answers of any length are read",
            "            if len(body) > limit:\n                break\n",
            "            if False:\n                break\n",
        ),
        (
            "client: any kind will do",
            'if isinstance(found, dict) and found.get("kind") == request.kind:',
            "if isinstance(found, dict):",
        ),
        (
            "client: redirects are followed",
            "        allow_redirects=False,\n",
            "",
        ),
        (
            "client: an error in a watch is an event",
            '    if found.get("type") == "ERROR":\n',
            "    if False:\n",
        ),
        (
            "client: a watch that is silent is waited for",
            "async with asyncio.timeout(silence):",
            "async with asyncio.timeout(None):",
        ),
        (
            "client: a line of a watch may be endless",
            "                    if len(rest) > _LARGEST:\n",
            "                    if False:\n",
        ),
        (
            "client: a watch keeps a token that is refused",
            "                        if response.status == 401:\n"
            "                            await self._renew(session)\n",
            "",
        ),
        (
            "client: a watch lives five minutes",
            "aiohttp.ClientTimeout(total=None)",
            "aiohttp.ClientTimeout(total=0.5)",
        ),
    ),
    *of(
        "npu_agent/kube/resourceslices.py",
        "tests/kube/test_apart.py",
        (
            "slices API: those of other nodes",
            'of_node = f"spec.nodeName={node}," if node else ""',
            'of_node = ""',
        ),
        (
            "slices API: another's field stays another's",
            'query={"fieldManager": FIELD_MANAGER, "force": "true"},',
            'query={"fieldManager": FIELD_MANAGER},',
        ),
        (
            "slices API: a watch begins now",
            '            "resourceVersion": resource_version,\n',
            "",
        ),
    ),
    *of(
        "npu_agent/kube/login.py",
        "tests/kube/test_client.py",
        (
            "login: a program that hangs goes on",
            "    transport.close()\n    with contextlib",
            "    with contextlib",
        ),
    ),
    *of(
        "npu_agent/kube/serviceaccount.py",
        "tests/kube/test_serviceaccount.py",
        (
            "service account: IPv6 without brackets",
            'return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"',
            'return f"https://{host}:{port}"',
        ),
    ),
    *of(
        "npu_agent/kube/node.py",
        "tests/kube/test_node.py tests/kube/test_client.py",
        (
            "node: another manager's labels are ours",
            '== (FIELD_MANAGER, "Apply")',
            '!= ("", "Apply")',
        ),
        (
            "node: an apply creates a Node",
            '{"name": node.name, "uid": node.uid}',
            '{"name": node.name}',
        ),
        (
            "node: asked past the cache",
            '        query={"resourceVersion": "0"},  # any will do: the API server answers from its cache\n',
            "",
        ),
        (
            "node: an empty object is owned",
            "    if labels:  # an empty",
            "    if True:  # an empty",
        ),
    ),
    *of(
        "npu_agent/outputs/dra/support.py",
        "tests/test_agent_dra.py",
        (
            "support: any kubelet will do",
            "return match is not None and (int(match[1]), int(match[2])) >= OLDEST",
            "return True",
        ),
        (
            "support: any API server will do",
            "    if not await resourceclaims.served(api):\n",
            "    if False:\n",
        ),
    ),
    *of(
        "npu_agent/inventory/watch.py",
        "tests/inventory/test_inventory.py",
        (
            "watch: a hang is no failure",
            '                self._failures[entry.family, entry.name, "hung"] += missed\n',
            "",
        ),
        (
            "watch: one missed deadline is all that count",
            "for _ in range(min(missed, settings.policy.failures)):",
            "for _ in range(0):",
        ),
        (
            "watch: a place that is taken again keeps its health",
            "            if entry is not self._begun:\n                self._begin(entry)\n",
            "            if self._begun is None:\n                self._begin(entry)\n",
        ),
        (
            "watch: a fault of our own hides nothing",
            '                self._show(entry, _not_served(entry, f"internal error: {error!r}"))\n',
            "",
        ),
        (
            "watch: a fault of our own is not counted",
            "                self._crashed(part)\n",
            "",
        ),
        (
            "watch: nodes that come late stay unknown",
            "            self._known = replace(card, nodes=card.nodes | found.nodes)\n",
            "            pass\n",
        ),
        (
            "watch: a missing node is no fault",
            "    missing = sorted(card.nodes - found.nodes)\n",
            "    missing = []\n",
        ),
        (
            "watch: one different answer changes a card",
            "return (found, None) if found == proposed else (known, found)",
            "return (found, None)",
        ),
        (
            "watch: half an answer is another card",
            '        found = replace(found, **{**kept, "nodes": known.nodes})\n',
            "        found = replace(found, nodes=known.nodes)\n",
        ),
        (
            "watch: heat is read as seldom as telemetry",
            "self._read_at = now + (0 if often else pause)",
            "self._read_at = now + pause",
        ),
        (
            "watch: our own limits fence a card",
            "            if error.errno in OWN_LIMITS:\n",
            "            if False:\n",
        ),
        (
            "watch: a reading of the card before",
            "                course, reading = health.begin(verdict, time.monotonic()), None\n",
            "                course, reading = health.begin(verdict, time.monotonic()), view.reading\n",
        ),
        (
            "watch: load of the card before",
            "            self._new, self._meter = True, Meter(wraps=entry.counters_wrap)\n",
            "            self._new = True\n",
        ),
    ),
    *of(
        "npu_agent/inventory/inventory.py",
        "tests/inventory/test_inventory.py",
        (
            "inventory: a list that grows card by card",
            "        if not before.complete and not all(view.probed for view in views.values()):\n            return",
            "        if False:\n            return",
        ),
        (
            "inventory: a search that fails takes the cards away",
            'settings, found, trouble = self._settings.value, self.found, ""\n',
            'settings, found, trouble = self._settings.value, (), ""\n',
        ),
        (
            "inventory: IDs that were known are forgotten",
            "            ids = identify(cards, self._known)\n",
            "            ids = identify(cards)\n",
        ),
        (
            "inventory: a card that went is watched",
            "                del self._watches[key]\n",
            "                pass\n",
        ),
        (
            "inventory: other settings hurry nobody",
            "                task.hurry()\n",
            "                pass\n",
        ),
        (
            "inventory: a search under way sets the next one by the interval before",
            "            if self._settings.value is settings:\n",
            "            if True:\n",
        ),
        (
            "inventory: a search that hangs is not shown",
            "                self._result(self.found, no_answer())\n",
            "                pass\n",
        ),
        (
            "inventory: threads go on after the end",
            "            pace.cancel()\n            self._rounds.follow(self, ())\n",
            "            pace.cancel()\n",
        ),
    ),
    *of(
        "npu_agent/core/health.py",
        "tests/core/test_health.py",
        (
            "health: failures need not be in a row",
            "    elif bad == fenced:\n        against = 0\n",
            "    elif bad == fenced:\n        against = course.against\n",
        ),
        (
            "health: silence brings a dead card back",
            "    if verdict.outcome is Outcome.SILENT and dead:\n",
            "    if False:\n",
        ),
        ("health: no hysteresis", "        limit -= _COOL_DOWN\n", "        pass\n"),
        (
            "health: one failure more",
            "if against >= (policy.recoveries if fenced else policy.failures):",
            "if against > (policy.recoveries if fenced else policy.failures):",
        ),
    ),
    *of(
        "npu_agent/cli.py",
        "tests/test_cli.py -k question_mark",
        (
            "cli: a character that stdout lacks ends the command",
            'sys.stdout.reconfigure(errors="replace")',
            "pass",
        ),
        (
            "cli: what was chosen for such a character has no effect",
            ' and sys.stdout.errors == "strict":',
            ":",
        ),
    ),
    *of(
        "npu_agent/commands/demo.py",
        "tests/commands/test_demo.py -k middle",
        (
            "demo: a reader that has gone is a traceback",
            "            raise first from errors\n",
            "            raise\n",
        ),
        (
            "demo: a hangup leaves its directory",
            "signal.SIGTERM, signal.SIGHUP)",
            "signal.SIGTERM)",
        ),
    ),
    *of(
        "npu_agent/commands/demo.py",
        "tests/commands/test_demo.py -k nohup",
        (
            "demo: nohup has no effect",
            "if signal.getsignal(number) is not signal.SIG_IGN:",
            "if True:",
        ),
    ),
    *of(
        "npu_agent/commands/demo.py",
        "tests/commands/test_demo.py -k one_line",
        (
            "demo: a disk that is full is a traceback",
            "    except (simulator.SimulatorError, OSError) as error:\n        raise CommandError(",
            "    except KeyError as error:\n        raise CommandError(",
        ),
        (
            "demo: a tree that vanishes is a traceback",
            "        if isinstance(first, simulator.SimulatorError):\n",
            "        if False:\n",
        ),
    ),
    *of(
        "npu_agent/commands/labels.py",
        "tests/commands/test_labels.py",
        (
            "labels apply: careful is never",
            "careful=doubt is not None)",
            "careful=False)",
        ),
        (
            "labels apply: firmware that hangs costs all",
            "    except OSError as error:\n",
            "    except KeyError as error:\n",
        ),
    ),
    *of(
        "npu_agent/outputs/labels/labeller.py",
        f"{LABELS}/test_labeller.py",
        (
            "labels: put before the hardware is known",
            "            if snapshot.complete:\n",
            "            if True:\n",
        ),
        (
            "labels: a reload is many writes",
            "                if await set_within(changed, _SETTLE):\n                    continue\n",
            "",
        ),
        (
            "labels: careful is never",
            "careful=now.unsure)",
            "careful=False)",
        ),
        (
            "labels: new ones are in place before there is an answer",
            "in_place = before.in_place and labels == before.labels",
            "in_place = before.in_place",
        ),
        (
            "labels: the server's wish to wait is not granted",
            "await asyncio.sleep(max(pause.next(), error.retry_after or 0.0))",
            "await asyncio.sleep(pause.next())",
        ),
        (
            "labels: all agents at the same moment",
            "now.resync * random.uniform(0.8, 1.2)",
            "now.resync",
        ),
        (
            "labels: the same trouble is logged each time",
            "        if reason != self._reported:\n",
            "        if True:\n",
        ),
        (
            "labels: a machine that cannot be read costs all",
            "            except OSError as error:\n                log.warning(\"the machine's",
            "            except KeyError as error:\n                log.warning(\"the machine's",
        ),
    ),
    *of(
        "npu_agent/outputs/labels/node.py",
        f"{LABELS}/test_node.py",
        (
            "labels: what no longer applies stays",
            "        gone = meta.applied - labels.keys()\n",
            "        gone = meta.applied & set()\n",
        ),
        (
            "labels: right values in other hands stay there",
            "        theirs = labels.keys() - meta.applied - wrong\n",
            "        theirs = labels.keys() & set()\n",
        ),
        (
            "labels: a write without an answer is forgotten",
            "        before, self._in_doubt = self._in_doubt, True\n",
            "        before = self._in_doubt\n",
        ),
        (
            "labels: a refusal settles an earlier write",
            "self._in_doubt = before  #",
            "self._in_doubt = False  #",
        ),
        (
            "labels: careful overwrites",
            "        if careful and meta.applied:\n",
            "        if False:\n",
        ),
        (
            "labels: a webhook's change is not seen",
            "        if refused:\n",
            "        if False:\n",
        ),
        (
            "labels: a Node that was made anew is not read again",
            "            if error.kind in (Kind.NOT_FOUND, Kind.CONFLICT, Kind.REFUSED):\n                self._known, self._trust = None, False\n",
            "",
        ),
        (
            "labels: a stale cache hides a change",
            "        self._trust = self._known is not None\n",
            "        self._trust = False\n",
        ),
    ),
    *of(
        "npu_agent/outputs/labels/compute.py",
        f"{LABELS}/test_compute.py",
        (
            "labels: cards of other vendors",
            "cards=tuple(state for state in snapshot.cards if state.card.family in set_.families),",
            "cards=snapshot.cards,",
        ),
        ("labels: values that are too long", '[:LONGEST].rstrip("-_.") or None', "or None"),
        (
            "labels: joined without limit",
            '    while len("_".join(kept)) > LONGEST:\n        kept.pop()\n',
            "",
        ),
        (
            "labels: a count without cards",
            "    if snapshot.cards:\n        names",
            "    if True:\n        names",
        ),
        (
            "labels: what is not served makes unsure",
            "for odd in snapshot.odd if odd.unread]",
            "for odd in snapshot.odd]",
        ),
    ),
    *of(
        "npu_agent/outputs/labels/nfd.py",
        f"{LABELS}/test_nfd.py",
        (
            "labels: written where NFD is not",
            "make_directory=False, durable=True",
            "make_directory=True, durable=True",
        ),
        (
            "labels: the file is written each time",
            "        if wanted == there:\n            return Counter()\n",
            "",
        ),
    ),
    *of(
        "npu_agent/outputs/events.py",
        "tests/outputs/test_events.py",
        (
            "events: one that is refused goes before new ones",
            "min(waiting.items(), key=lambda each: each[1].refused)",
            "next(iter(waiting.items()))",
        ),
        (
            "events: all is well while one is refused",
            " and not any(one.refused for one in waiting.values()):",
            ":",
        ),
        (
            "events: what is refused again is news again",
            "again = record.refused > 0 and error.kind in _OF_ONE",
            "again = False",
        ),
        (
            "events: what is under way is lost",
            " and event != self._sending:",
            ":",
        ),
        (
            "events: each card is added at the start",
            "        if previous is None and before.complete:\n",
            "        if previous is None:\n",
        ),
        (
            "events: a card that is sick at the start is none",
            "was = previous.health.state if previous else HealthState.HEALTHY",
            "was = previous.health.state if previous else HealthState.UNHEALTHY",
        ),
        (
            "events: what repeats is another one",
            "        if record.name:\n",
            "        if False:\n",
        ),
        (
            "events: more than the limit wait",
            ">= _MOST:",
            ">= 10 * _MOST:",
        ),
        (
            "events: without a limit",
            "            if allowed < 1:\n",
            "            if False:\n",
        ),
        (
            "events: one that is refused is tried for ever",
            "                if error.kind is Kind.REFUSED:  # it would be refused again\n",
            "                if False:\n",
        ),
    ),
    *of(
        "npu_agent/doctor/cluster.py",
        "tests/doctor/test_decisions.py tests/doctor/test_examine.py",
        (
            "doctor: Unknown is ready",
            'if ready and condition.get("status") != "True":',
            'if ready and condition.get("status") == "False":',
        ),
        (
            "doctor: a cordon is no news",
            '    if part(node, "spec").get("unschedulable"):\n',
            "    if False:\n",
        ),
        (
            "doctor: fewer devices than are healthy will do",
            "    if count in map(str, range(healthy, healthy + claimed + 1)):\n",
            "    if int(count) <= healthy + claimed:\n",
        ),
        (
            "doctor: a right that is missing is none of its business",
            "    if allowed[right]:\n",
            "    if True:\n",
        ),
        (
            "doctor: events need no rights",
            '        rights["create", "events"] = "Events report what becomes of its cards"\n',
            "",
        ),
        (
            "doctor: rights to Events anywhere",
            'where = {"namespace": NAMESPACE}',
            "where = {}",
        ),
        (
            "doctor: without credentials on a host all is wrong",
            "if error.kind is Kind.CREDENTIALS and not await here.see_or(credentials_expected, True):",
            "if False:",
        ),
        (
            "doctor: labels in other hands are right",
            "    if not finding.remedy and (theirs := sorted(right.keys() - node.applied)):\n",
            "    if not finding.remedy and (theirs := sorted(())):\n",
        ),
        (
            "doctor: labels that should be gone are right",
            "sorted(ours - right.keys())]",
            "sorted(())]",
        ),
    ),
    *of(
        "npu_agent/doctor/kubelet.py",
        "tests/doctor/test_decisions.py tests/doctor/test_examine.py",
        (
            "doctor: an exclusive lock",
            "fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)",
            "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        ),
        (
            "doctor: a second plugin is not noticed",
            "    if strange := sorted(ids - {device.id for device in devices}):\n",
            "    if strange := sorted(ids - ids):\n",
        ),
        (
            "doctor: the same cards under two resources",
            "        if both := sorted(id_ for id_ in known[other] if footprints_of(id_, cards)):\n",
            "        if both := sorted(()):\n",
        ),
        (
            "doctor: devices that the kubelet lacks",
            "    if missing := healthy - ids:\n",
            "    if missing := ids - ids:\n",
        ),
        (
            "doctor: what is held counts as missing",
            "        if device.healthy and conflicts.against((resource, device.id), device) is None\n",
            "        if device.healthy\n",
        ),
        (
            "doctor: what a claim holds counts as missing",
            "device.id for device in free if device.card_id not in claimed)",
            "device.id for device in free)",
        ),
        (
            "doctor: who holds cards by claims is not asked",
            "fetch(socket_beside(here.directory), here.drivers)",
            "fetch(socket_beside(here.directory))",
        ),
        (
            "doctor: a Pod on a card that is gone is no news",
            "    if gone and seen.complete and not doubtful(seen):\n",
            "    if False:\n",
        ),
        (
            "doctor: a card that cannot be read is gone",
            "    if gone and seen.complete and not doubtful(seen):\n",
            "    if gone:\n",
        ),
    ),
    *of(
        "npu_agent/doctor/host.py",
        "tests/doctor/test_decisions.py tests/doctor/test_examine.py",
        (
            "doctor: a card without a driver is no news",
            "    unbound = [card for card in lost if card.driver is None]\n",
            "    unbound = []\n",
        ),
        (
            "doctor: a card for virtual machines is lost",
            "if card.driver and card.driver.startswith(_HANDED_ON)]",
            "if False]",
        ),
        (
            "doctor: a sick card is fine",
            "    if health.state is Health.UNHEALTHY:\n",
            "    if False:\n",
        ),
        (
            "doctor: missing nodes are fine",
            '            yield f"/dev/{node} is missing"\n',
            "            pass\n",
        ),
        (
            "doctor: a disabled card is fine",
            "    if names(state) & {word.lower() for word in disabled}:\n",
            "    if False:\n",
        ),
    ),
    *of(
        "npu_agent/doctor/privileges.py",
        "tests/doctor/test_decisions.py tests/doctor/test_examine.py",
        (
            "doctor: capabilities are fine",
            '    if capabilities := int(fields["CapEff"], 16):\n',
            '    if capabilities := int(fields["CapEff"], 16) & _SYS_ADMIN:\n',
        ),
        (
            "doctor: a writable root is fine",
            'return bool(options) and "ro" not in options[-1]',
            "return False",
        ),
        (
            "doctor: the first mount of the root counts",
            '"ro" not in options[-1]',
            '"ro" not in options[0]',
        ),
        (
            "doctor: no seccomp is fine",
            '    if fields.get("Seccomp", "0") == "0":\n',
            "    if False:\n",
        ),
    ),
    *of(
        "npu_agent/core/timeline.py",
        "tests/core/test_timeline.py",
        ("timeline: what repeats is not counted", "count=same.count + 1", "count=same.count"),
        ("timeline: it grows without end", "[-MOST:]", "[:]"),
        ("timeline: cards that left pile up", "[:GONE]", "[:]"),
    ),
    *of(
        "npu_agent/core/happened.py",
        "tests/core/test_happened.py",
        ("timeline: a card that comes gives its holders news", "if card in names:", "if card:"),
        ("timeline: old errors are news", '("", counters))', '("", ()))'),
    ),
    *of(
        "npu_agent/core/problems.py",
        "tests/core/test_problems.py",
        (
            "problems: health.maxTemperature hides heat",
            "min(HOT, state.max_temperature)",
            "state.max_temperature",
        ),
        ("problems: old errors never calm down", "state.monotonic - one.at < _RISING", "True"),
        (
            "clock: a card is missed by the wall clock",
            "if state.monotonic - left.since < _MISSED:",
            "if state.now - left.since < _MISSED:",
        ),
        (
            "problems: a card that left is forgotten",
            "if state.monotonic - left.since < _MISSED:",
            "if 0:",
        ),
    ),
    *of(
        "npu_agent/outputs/web/chronicle.py",
        "tests/outputs/web/test_chronicle.py",
        (
            "timeline: who held a card before was given it now",
            "if now - started > self._settle:",
            "if True:",
        ),
        (
            "timeline: cards that left are not kept",
            "self.timeline = self.timeline.left(left, hardware.cards, now)",
            "pass",
        ),
    ),
    *of(
        "npu_agent/outputs/web/tiles.py",
        "tests/outputs/web/test_page.py",
        ("page: sick cards wait their turn", "key=lambda card: _urgency(card, state)", "key=id"),
        ("page: many cards are as large as few", "MANY = 12", "MANY = 1_000"),
    ),
    *of(
        "npu_agent/outputs/web/history.py",
        "tests/outputs/web/test_history.py",
        (
            "page: a peak is lost",
            "self.temperature[-1] = hottest",
            "self.temperature[-1] = now.temperature",
        ),
    ),
    *of(
        "npu_agent/outputs/web/pages.py",
        "tests/outputs/web/test_pages.py tests/outputs/web/test_server.py",
        (
            "web: everybody gets gzip",
            "if len(found.body) < _WORTH_IT or not takes_gzip(encodings):",
            "if len(found.body) < _WORTH_IT:",
        ),
        (
            "web: nobody gets gzip",
            "if len(found.body) < _WORTH_IT or not takes_gzip(encodings):",
            "if True:",
        ),
        (
            "web: any method is a GET",
            '        if method not in ("GET", "HEAD"):\n',
            "        if False:\n",
        ),
        (
            "web: unready is 200",
            "status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK",
            "status = HTTPStatus.OK",
        ),
        (
            "web: a page that fails is logged each time",
            "            if path not in self._failing:\n",
            "            if True:\n",
        ),
        (
            "web: one failure is logged for good",
            "        self._failing.discard(path)\n",
            "",
        ),
        (
            "web: the page is made once",
            "if kept is None or now - kept.at > _FRESH:",
            "if kept is None:",
        ),
        (
            "web: OpenMetrics under the name of text",
            "return _answer(body, _OPENMETRICS if openmetrics else _TEXT)",
            "return _answer(body, _TEXT)",
        ),
    ),
    *of(
        "npu_agent/outputs/web/tls.py",
        "tests/outputs/web/test_tls.py",
        (
            "web: a certificate is not tried out",
            "    expires_at = _tried(context, where.cert, cert)\n",
            "    expires_at = 2e9\n",
        ),
        (
            "web: clients need no certificate",
            "        context.verify_mode = ssl.CERT_REQUIRED\n",
            "        pass\n",
        ),
    ),
    *of(
        "npu_agent/outputs/web/authorization.py",
        "tests/outputs/web/test_authorization.py",
        (
            "web: a right to one page is one to all",
            'token.encode(errors="surrogateescape")).digest(), path\n',
            'token.encode(errors="surrogateescape")).digest(), ""\n',
        ),
        (
            "web: an answer is kept for ever",
            "return found if found and _now() < found.until else None",
            "return found",
        ),
        (
            "web: tokens are asked about without end",
            "if not self._pace.take(address, _now()):",
            "if False:",
        ),
    ),
    *of(
        "npu_agent/outputs/web/gate.py",
        "tests/outputs/web/test_gate.py",
        (
            "web: any number of connections",
            'return "open" if self._open.total() >= self.bounds.most else ""',
            'return ""',
        ),
        (
            "web: any number of connections of one address",
            "        if self._open[address] >= self.bounds.most_each:\n",
            "        if False:\n",
        ),
        (
            "web: one address uses up the rate of all",
            "        if self._each.get(address, now) - now > self._seconds:\n",
            "        if False:\n",
        ),
    ),
    *of(
        "npu_agent/outputs/web/listener.py",
        "tests/outputs/web/test_server.py",
        (
            "web: a refusal lets nobody in any more",
            "            self._pause(_PAUSE)\n",
            "            self._pause(3600.0)\n",
        ),
    ),
    *of(
        "npu_agent/outputs/web/connections.py",
        "tests/outputs/web/test_server.py",
        (
            "web: who has gone is counted for ever",
            "            self._gate.leave(address)\n",
            "            pass\n",
        ),
        (
            "web: who does not read is waited for",
            "async with asyncio.timeout(_TAKE):",
            "async with asyncio.timeout(None):",
        ),
    ),
    *of(
        "npu_agent/outputs/web/connections.py",
        "tests/outputs/web/test_tls.py",
        (
            "web: an answer over TLS is never written",
            "set_write_buffer_limits(high=1)",
            "set_write_buffer_limits(high=0)",
        ),
    ),
    *of(
        "npu_agent/outputs/web/negotiate.py",
        "tests/outputs/web/test_negotiate.py",
        (
            "web: weights are not read",
            "return openmetrics > 0 and openmetrics >= plain",
            "return openmetrics > 0",
        ),
        (
            "web: gzip that is refused",
            'return qualities.get("gzip", qualities.get("*", 0.0)) > 0',
            'return "gzip" in qualities or "*" in qualities',
        ),
        (
            "web: any version of OpenMetrics",
            '            if parameters.get("version", "") in _OPENMETRICS_VERSIONS:\n',
            "            if True:\n",
        ),
    ),
    *of(
        "npu_agent/outputs/prometheus/page.py",
        "tests/outputs/prometheus/test_page.py",
        (
            "metrics: rendered although nobody asks",
            "            if time.monotonic() - self._asked_at > _ASKED_FOR:\n",
            "            if False:\n",
        ),
        (
            "metrics: old readings are shown for ever",
            "            snapshot = cards.recent(snapshot, now - late)\n",
            "",
        ),
        (
            "metrics: a page that has become stale is served",
            "if self._behind or self._asked_at >= self._stale_at:",
            "if self._behind:",
        ),
        (
            "metrics: one odd value costs the page",
            "        except Exception:\n            self.failures[name] += 1",
            "        except KeyError:\n            self.failures[name] += 1",
        ),
        (
            "metrics: failures are not counted",
            "            self.failures[name] += 1\n",
            "",
        ),
        (
            "metrics: no end of OpenMetrics",
            'b"# EOF\\n" if openmetrics',
            'b"" if openmetrics',
        ),
        (
            "metrics: podLabels has no effect",
            "pod_labels=settings.pod_labels\n",
            "pod_labels=True\n",
        ),
    ),
    *of(
        "npu_agent/outputs/prometheus/cards.py",
        "tests/outputs/prometheus/test_cards.py",
        (
            "metrics: two holders of a card are one",
            "return holders[0] if holders and all(one == holders[0] for one in holders) else {}",
            "return holders[0] if holders else {}",
        ),
        (
            "metrics: a core has its neighbour's holder",
            "_alone(one for one in holdings if core in one.cores)",
            "_alone(holdings)",
        ),
    ),
    *of(
        "npu_agent/outputs/prometheus/text.py",
        "tests/outputs/prometheus/test_text.py",
        (
            "metrics: buckets are not cumulative",
            "        count += here\n",
            "        count = here\n",
        ),
        (
            "metrics: infinity is a number",
            "return number if math.isfinite(number) else None",
            "return number",
        ),
        (
            "metrics: any number of names",
            "            if len(self._named) >= _MOST_NAMED:",
            "            if False:",
        ),
    ),
    # A broken parser for each target of tests/fuzz.
    *of(
        "npu_agent/vendors/furiosa/parse.py",
        "tests/fuzz/test_corpus.py -k sysfs-text",
        ("fuzz: sysfs-text", "line if line.isprintable() and line else None", "line or None"),
    ),
    *of(
        "npu_agent/vendors/furiosa/parse.py",
        "tests/fuzz/test_corpus.py -k sysfs-numbers",
        (
            "fuzz: sysfs-numbers",
            "        if not name.isascii() or not name.isprintable():",
            "        if not name.isascii():",
        ),
    ),
    *of(
        "npu_agent/vendors/furiosa/parse.py",
        "tests/fuzz/test_corpus.py -k sysfs-counters",
        (
            "fuzz: sysfs-counters",
            "([0-9a-fA-F]{1,16})[ \\t\\r]*$",
            "([0-9a-fA-F]{1,40})[ \\t\\r]*$",
        ),
    ),
    *of(
        "npu_agent/vendors/furiosa/parse.py",
        "tests/fuzz/test_corpus.py -k sysfs-liveness",
        ("fuzz: sysfs-liveness", "{said[:20]!r}", "{said.decode('latin-1')}"),
    ),
    *of(
        "npu_agent/outputs/prometheus/process.py",
        "tests/outputs/prometheus/test_process.py",
        ("process: resident is virtual", "resident=resident * page", "resident=virtual * page"),
        ("process: since the boot", "return booted_at + ", "return "),
        (
            "process: no limit is a limit",
            "None if most == resource.RLIM_INFINITY else most",
            "most",
        ),
    ),
    *of(
        "npu_agent/kubelet/ledger.py",
        "tests/outputs/deviceplugin/test_publisher.py",
        (
            "ledger: written before it is read",
            "        async with self._saving:  # which would write over what is to be read\n",
            "        self._owner = True\n        if True:\n",
        ),
    ),
    *of(
        "npu_agent/core/kept.py",
        "tests/core/test_kept.py",
        ("kept: for ever", "            if calls > due:\n", "            if False:\n"),
        ("kept: what is asked for is forgotten", "        asked.add(id(result))\n", ""),
        ("kept: a few are too many", "max(len(results), _FEW)", "1"),
    ),
    *of(
        "npu_agent/kubelet/places.py",
        "tests/kubelet/test_places.py tests/test_agent_moves.py",
        (
            "places: found once for ever",
            "if not (self._seen and all(",
            "if not (self._seen or all(",
        ),
    ),
    *of(
        "npu_agent/core/ledger.py",
        "tests/core/test_ledger.py",
        (
            "ledger: a whole card's ID is a part's",
            "    if id_ in known:\n        return Footprint(keys_of(card), card.all_cores, "
            "frozenset(card.access.nodes()))\n    for name in known:",
            "    for name in known:",
        ),
    ),
    *of(
        "npu_agent/vendors/furiosa/sysfs.py",
        "tests/vendors tests/inventory",
        (
            "sysfs: what comes later is not found",
            "if before and before[0] == names:",
            "if before:",
        ),
    ),
    *of(
        "npu_agent/kubelet/rpc.py",
        "tests/kubelet/test_rpc.py",
        ("endpoint: who connects at the end is left", "_ACCEPTING = 2", "_ACCEPTING = 0"),
    ),
    *of(
        "npu_agent/kubelet/rpc.py",
        "tests/outputs/dra/test_endpoint.py",
        (
            "endpoint: streams are cut",
            "await streams.until(lambda number: not number)",
            "pass",
        ),
        (
            "endpoint: the end waits for streams",
            "async with asyncio.timeout(_DRAINED):",
            "async with asyncio.timeout(100 * _DRAINED):",
        ),
    ),
    *of(
        "npu_agent/vendors/furiosa/sysfs.py",
        "tests/fuzz/test_corpus.py -k sysfs-card",
        (
            "fuzz: sysfs-card",
            'parse.identifier(_optional(f"{directory}/device_uuid"))',
            'parse.text(_optional(f"{directory}/device_uuid"))',
        ),
    ),
    *of(
        "npu_agent/outputs/labels/compute.py",
        "tests/fuzz/test_corpus.py -k machine",
        ("fuzz: machine", 'plain.strip("-_.")[:LONGEST]', "plain[:LONGEST]"),
    ),
    *of(
        "npu_agent/doctor/host.py",
        "tests/fuzz/test_corpus.py -k pci-id",
        ("fuzz: pci-id", 'raw.decode(errors="replace")', "raw.decode()"),
    ),
    *of(
        "npu_agent/config/schema.py",
        "tests/config/test_load.py",
        (
            "config: a host name that cannot be resolved at all",
            r"(\.[A-Za-z0-9-]{1,63})*",
            r"(\.[A-Za-z0-9-]*)*",
        ),
    ),
    *of(
        "npu_agent/config/yaml_tree.py",
        "tests/fuzz/test_corpus.py -k config",
        ("fuzz: config", "        if not depth:\n", "        if depth < -9999:\n"),
    ),
    *of(
        "npu_agent/outputs/web/negotiate.py",
        "tests/fuzz/test_corpus.py -k accept",
        ("fuzz: accept", "except ValueError:", "except ZeroDivisionError:"),
    ),
    *of(
        "npu_agent/outputs/web/authorization.py",
        "tests/fuzz/test_corpus.py -k authorization",
        ("fuzz: authorization", 'token.encode(errors="surrogateescape")', "token.encode()"),
    ),
    *of(
        "npu_agent/kube/credentials.py",
        "tests/fuzz/test_corpus.py -k token",
        ("fuzz: token", "(secret.isascii() and secret.isprintable())", "secret.isascii()"),
    ),
    *of(
        "npu_agent/outputs/labels/nfd.py",
        "tests/fuzz/test_corpus.py -k feature-file",
        ("fuzz: feature-file", 'if key and not key.startswith("#")', 'if not key.startswith("#")'),
    ),
    *of(
        "npu_agent/kubelet/decode.py",
        "tests/fuzz/test_corpus.py -k pod-resources",
        (
            "fuzz: pod-resources",
            "range(0, 70, 7), range(at, end)",
            "range(0, 70, 7), range(at, at + 10)",
        ),
    ),
    *of(
        "npu_agent/kubelet/decode.py",
        "tests/fuzz/test_corpus.py -k allocatable",
        (
            "fuzz: allocatable",
            'raise _wrong_type("AllocatableResourcesResponse", tag, start)',
            "raise KeyError(tag)",
        ),
    ),
    *of(
        "npu_agent/kubelet/rpc.py",
        "tests/fuzz/test_corpus.py -k grpc-frame",
        (
            "fuzz: grpc-frame",
            "except AssertionError:  # grpclib's",
            "except KeyError:  # grpclib's",
        ),
    ),
    *of(
        "npu_agent/kubelet/rpc.py",
        "tests/fuzz/test_corpus.py -k grpc-request",
        ("fuzz: grpc-request", "if field := _mistyped(request):", "if field := None:"),
    ),
    *of(
        "npu_agent/doctor/kubelet.py",
        "tests/fuzz/test_corpus.py -k kubelet-checkpoint",
        (
            "fuzz: kubelet-checkpoint",
            "except (ValueError, KeyError, TypeError, AttributeError, RecursionError):",
            "except (ValueError, KeyError, TypeError, RecursionError):",
        ),
    ),
    *of(
        "npu_agent/core/ledger.py",
        "tests/fuzz/test_corpus.py -k ledger-record",
        (
            "fuzz: ledger-record",
            "except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):",
            "except (ValueError, KeyError, TypeError, AttributeError, RecursionError):",
        ),
    ),
    *of(
        "npu_agent/kubelet/ownership.py",
        "tests/kubelet/test_ownership.py",
        (
            "ownership: who leaves late loses the lock that was taken again",
            "if mine == self._held and files.gone(",
            "if files.gone(",
        ),
    ),
    *of(
        "npu_agent/kubelet/ownership.py",
        "tests/fuzz/test_corpus.py -k lock",
        (
            "fuzz: lock",
            "except (OSError, ValueError, KeyError, TypeError, RecursionError):",
            "except (OSError, ValueError, TypeError, RecursionError):",
        ),
    ),
    *of(
        "npu_agent/kube/errors.py",
        "tests/fuzz/test_corpus.py -k api-refusal",
        (
            "fuzz: api-refusal",
            "    except (ValueError, OverflowError):\n        return None",
            "    except OverflowError:\n        return None",
        ),
    ),
    *of(
        "npu_agent/kube/node.py",
        "tests/fuzz/test_corpus.py -k node",
        ("fuzz: node", " or not all(isinstance(v, str) for v in labels.values()):", ":"),
    ),
    *of(
        "npu_agent/core/claim.py",
        "tests/fuzz/test_corpus.py -k claim",
        (
            "fuzz: claim",
            '_mapping(allocation or {}, "status.allocation").get("devices")',
            '(allocation or {}).get("devices")',
        ),
    ),
    *of(
        "npu_agent/kube/reviews.py",
        "tests/fuzz/test_corpus.py -k review",
        (
            "fuzz: review",
            'status.get("authenticated") is not True',
            'not status.get("authenticated")',
        ),
    ),
    *of(
        "npu_agent/kube/resourceslices.py",
        "tests/fuzz/test_corpus.py -k slices",
        ("fuzz: slices", '        and isinstance(pool.get("resourceSliceCount"), int)\n', ""),
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
        waits = copy / "tests/until.py"  # for what never comes, in most cases
        waits.write_text(waits.read_text().replace("DEADLINE = 30.0", "DEADLINE = 8.0"))
        for fault in faults:
            good = noticed(fault, copy)
            print("noticed " if good else "SURVIVED", fault.name, flush=True)
            if not good:
                survivors.append(fault.name)
    print(f"{len(faults) - len(survivors)} of {len(faults)} faults noticed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
