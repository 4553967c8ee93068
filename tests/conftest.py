"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# In CI the same examples each time: a change should not fail for what it did not touch. People
# get new ones at every run, and so find what is left to find.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("people", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "people")
