"""The attacks. A new one is a function in one of these modules.

Its docstring is its row in docs/reliability.md: a paragraph on what is done, one on what has to
hold. It gets an agent that is well, and raises if that did not withstand; what has to hold after
every attack is asserted by `world.withstood`. One that takes seconds and is steady is `short`.
"""

from tests.chaos.attacks import (  # noqa: F401 (which enters them into the table)
    apiserver,
    cards,
    config,
    directories,
    kubelet,
    pages,
    process,
)
from tests.chaos.table import ATTACKS

__all__ = ["ATTACKS"]
