"""The attacks. A new one is a function in one of these modules.

Its docstring has two paragraphs: what is done, and what has to hold. It gets an agent that is
ready, and raises if an assertion failed; what has to hold after every attack is asserted by
`world.withstood`. One that takes seconds and is steady is `short`. Each module is a row of
docs/dev/reliability.md.
"""

from tests.chaos.attacks import (  # noqa: F401 (which enters them into the table)
    apiserver,
    cards,
    config,
    directories,
    evictions,
    kubelet,
    pages,
    pods,
    process,
)
from tests.chaos.table import ATTACKS

__all__ = ["ATTACKS"]
