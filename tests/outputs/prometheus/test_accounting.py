"""Which agent counts: the one that owns the node's devices."""

from npu_agent.core.accounting import UNHELD, Subject
from npu_agent.core.ledger import Usage
from npu_agent.feed import Feed
from npu_agent.outputs.prometheus.accounting import Accountant
from tests.outputs.prometheus.helpers import card, snapshot


async def test_an_agent_that_stands_by_counts_nothing() -> None:
    now, owned = 0.0, False
    holdings: Feed[tuple[Usage, ...]] = Feed(())
    accountant = Accountant(
        snapshots=Feed(snapshot(card())),
        holdings=holdings,
        longest=Feed(15.0),
        owned=lambda: owned,
        clock=lambda: now,
    )
    assert accountant.count() == {}
    now = 100.0
    assert accountant.count() == {}
    owned = True
    accountant.count()
    now = 110.0
    (account,) = accountant.count().values()
    assert (account.since, account.reserved) == (100.0, 80.0)
    owned = False
    accountant.count()
    now = 200.0
    assert accountant.count()[Subject("rngd", "npu0", UNHELD)].reserved == 80.0
