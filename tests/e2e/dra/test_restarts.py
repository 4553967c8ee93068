"""Losses of the kubelet, of the agent and of the whole node, with claims prepared."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from tests.cluster import settings
from tests.e2e.dra.claims import (
    claim_of,
    prepared,
    run,
    running,
    said,
    seen,
    slices,
    specs,
    verified,
    waits,
)
from tests.e2e.dra.conftest import published
from tests.e2e.manifests import DRIVER, claim, claim_pod, request, small, template
from tests.e2e.node import SOON, Node

BACK = 3.0
"""Seconds after which slices that were deleted are back."""
ENDS = "trap 'exit 3' TERM; while :; do sleep 0.1; done"
"""The command of a container that ends, and is started again, when its first process gets TERM."""


def uids(node: Node) -> set[str]:
    return {each["metadata"]["uid"] for each in slices(node)}


def gone(node: Node, name: str) -> bool:
    """Whether there is no Pod of this name, not even one that is being deleted."""
    return name not in {one["metadata"]["name"] for one in node.objects("pod", "default")}


def made(node: Node, count: int) -> str:
    """The name of a template for so many cards."""
    name = f"cards-{count}"
    node.apply(template(name, request(count=count)))
    return name


def test_the_kubelet_restarts_and_then_a_container(node: Node) -> None:
    run(node, claim_pod("steady"), claim_pod("restarts", command=ENDS, restartPolicy="Always"))
    before = {name: verified(node, name, 1) for name in ("steady", "restarts")}
    held, there = prepared(node), uids(node)

    node.cluster.stop_kubelet()
    with ThreadPoolExecutor(1) as executor:
        started = executor.submit(node.cluster.start_kubelet)
        node.wait_for("slices to be deleted", lambda: uids(node) != there, 2 * SOON)
        deleted = time.monotonic()
        node.wait_for("new ones", lambda: uids(node) - there)
        took = time.monotonic() - deleted
        started.result()
    print(f"after a kubelet's start the slices are back in {took:.2f} s")
    assert took < BACK
    published(node)
    assert prepared(node) == held

    node.cluster.exec("restarts", "sh", "-c", "kill -TERM 1")
    node.wait_equal("a restart", lambda: node.restarts()["restarts"], 1)
    running(node, "restarts")
    assert {name: verified(node, name, 1) for name in before} == before
    assert node.restarts() == {"steady": 0, "restarts": 1}
    # The kubelet knows us again: the next Pod gets another card, and all can end.
    run(node, claim_pod("next"))
    cards = {card for each in before.values() for card in each.cards}
    assert not verified(node, "next", 1).cards & cards


def test_the_record_is_lost_with_the_agent(node: Node) -> None:
    run(node, claim("mine"), claim_pod("one"), claim_pod("two", of_claim="mine"))
    before = {name: verified(node, name, 1) for name in ("one", "two")}
    held, made = prepared(node), specs(node)
    agent = node.agent_run()
    (node.cluster.kubelet_dir / "device-plugins" / ".npu-agent.ledger.json").unlink()
    node.kill_agent()
    node.wait_restarted(agent)
    node.wait_equal("the claims to be found", lambda: prepared(node), held)
    assert specs(node) == made
    # Nobody is given what they hold, and they can end.
    run(node, template("six", request(count=6)), small("six", of_template="six"))
    cards = {card for each in before.values() for card in each.cards}
    assert not seen(node, "six").cards & cards
    assert {name: verified(node, name, 1) for name in before} == before


def test_the_agent_is_away_until_the_kubelet_gives_it_up(node: Node) -> None:
    # With no time to end in, the API server would forget the Pod before the kubelet does.
    run(node, claim_pod("steady"), claim_pod("ends", terminationGracePeriodSeconds=1))
    before = verified(node, "steady", 1)
    with node.without_agent():
        # Who comes and goes meanwhile has to wait.
        node.apply(claim_pod("next"))
        said(node, "next", f"DRA driver {DRIVER} is not registered")
        node.kubectl("delete", "pod", "ends", "--wait=false")
        node.wait_for("the kubelet to delete the slices", lambda: not slices(node), 60)
        assert not gone(node, "ends")
    published(node)
    running(node, "next", timeout=2 * SOON)
    node.wait_for("the Pod to be gone", lambda: gone(node, "ends"), 2 * SOON)
    assert verified(node, "steady", 1) == before
    assert not verified(node, "next", 1).cards & before.cards
    assert node.restarts() == {"steady": 0, "next": 0}


def test_after_a_forced_deletion_the_next_pod_waits_for_the_container(node: Node) -> None:
    run(node, small("others", of_template=made(node, 7)))
    marked = "100123"  # tells its process apart
    run(node, small("old", command=f"exec sleep {marked}", terminationGracePeriodSeconds=10))
    (card,) = seen(node, "old").cards
    node.apply(claim_pod("next"))
    node.delete_by_force("old")
    # The scheduler has given the card away already; the kubelet gives a container two seconds.
    running(node, "next", timeout=2 * SOON)
    assert not node.sleeps(marked)
    assert verified(node, "next", 1).cards == {card}
    log = node.log()
    after = log.rindex("claim unprepared claim=default/old-npus-")
    assert log.rindex("claim prepared claim=default/next-npus-") > after


def test_a_claim_is_unprepared_while_its_containers_run(node: Node) -> None:
    """As a kubelet does it once a minute with claims of Pods that it has forgotten."""
    run(node, small("others", of_template=made(node, 7)))
    marked = "100124"
    run(node, small("old", command=f"exec sleep {marked}", terminationGracePeriodSeconds=180))
    (card,) = seen(node, "old").cards
    node.apply(small("next"))
    node.forget_pod("old")
    # First the claim that is still prepared has the card, then the Pod that nobody lists.
    said(node, "next", "(ResourceClaim default/old-npus-")
    said(
        node,
        "next",
        "; not listed by the kubelet, but its containers still run) still holds its cores",
        120,
    )
    assert len(prepared(node)) == 1
    assert node.sleeps(marked)
    agent = node.agent_run()
    node.kill_agent()
    node.wait_restarted(agent)
    still = "not listed by the kubelet, but its containers still run)"
    node.wait_for("the next one to know it too", lambda: still in node.log(), 4 * SOON)
    assert node.sleeps(marked)
    assert node.pod("next")["status"]["phase"] == "Pending"
    node.end_sleep(marked)
    running(node, "next", timeout=2 * SOON)
    assert seen(node, "next").cards == {card}


def test_a_pod_that_joins_a_claim_keeps_its_card(node: Node) -> None:
    """All Pods of the claim are forgotten as soon as pod-resources has listed it; it runs on."""
    run(node, small("others", of_template=made(node, 7)))
    marked = "100125"
    run(node, claim("shared"), claim_pod("first", of_claim="shared"))
    lasting = {"command": f"exec sleep {marked}", "terminationGracePeriodSeconds": 180}
    run(node, small("later", of_claim="shared", **lasting))
    (card,) = seen(node, "later").cards
    node.wait_known("later")
    for name in ("first", "later"):
        node.forget_pod(name)
    node.kubectl("delete", "resourceclaim", "shared", "--wait=false")
    node.wait_for("the kubelet to unprepare it", lambda: not shared(node), 4 * SOON)
    node.apply(small("next"))
    waits(node, "next")  # the card has the taint `held`
    still = "default/shared; not listed by the kubelet, but its containers still run)"
    assert f"Pod default/later (ResourceClaim {still}" in node.log()
    assert node.sleeps(marked)
    node.end_sleep(marked)
    running(node, "next", timeout=3 * SOON)
    assert seen(node, "next").cards == {card}


def shared(node: Node) -> bool:
    return "default/shared" in prepared(node)


def test_the_node_reboots(node: Node) -> None:
    run(node, claim_pod("always", restartPolicy="Always"), claim_pod("once"))
    before = {name: verified(node, name, 1) for name in ("always", "once")}
    kept = prepared(node)
    node.cluster.stop_kubelet()
    ctr = ("ctr", "--address", settings.CONTAINERD_SOCKET, "--namespace", "k8s.io", "tasks")

    def nothing_runs() -> bool:
        tasks = node.cluster.enter(*ctr, "list", "--quiet").stdout.split()
        for task in tasks:
            node.cluster.enter(*ctr, "kill", "--all", "--signal=KILL", task, check=False)
            node.cluster.enter(*ctr, "delete", "--force", task, check=False)
        return not tasks

    node.wait_for("no container to run", nothing_runs, 2 * SOON)
    # /run is empty after a boot. The kubelet's directories are not: without sockets is worse.
    for path in (
        *(node.cluster.run_dir / "cdi").iterdir(),
        *(node.cluster.kubelet_dir / "plugins_registry").iterdir(),
        *(node.cluster.kubelet_dir / "plugins" / DRIVER).iterdir(),
    ):
        path.unlink()
    node.cluster.start_kubelet(timeout=120)
    restarted = "the Pod that restarts to run"
    node.wait_for(restarted, lambda: node.restarts()["always"] == 1, 2 * SOON)
    running(node, "always", timeout=2 * SOON)
    assert verified(node, "always", 1) == before["always"]
    uid = claim_of(node, "always")["metadata"]["uid"]
    assert f"furiosa.ai-claim-{uid}.json" in specs(node)
    assert prepared(node) <= kept
    # A Pod that does not restart has ended with its containers, and so has its claim.
    assert node.wait_phase("once", "Failed", 2 * SOON)
    published(node)
    run(node, claim_pod("next"))
    assert not verified(node, "next", 1).cards & before["always"].cards
