"""`npu-agent doctor`: whether all that the agent needs is there, on this host and in this cluster.

`examine` runs everything; each subject is a module of its own, with what reads its part of the host
and what judges it. Nothing here changes anything. What the running agent reports itself is taken
from its /status.json (`agent`); only what the agent cannot see is judged here.

A line of the report is a check: an `async def` that takes the `Context` and returns a `Check`, made
by `ok`, `note`, `unused`, `unknown` or `wrong`. To add one:

1. Write it into the module of its subject, and `yield` its name and itself in `lines` there, at the
   place where people should read it. A new subject is a module with `lines`, and its row in
   `examine.SUBJECTS`.
2. What may block goes through `Context.in_thread`, which has a deadline. Where something cannot be
   seen, raise `Unknown`: the line is then unknown, and says why. An ApiError does the same.
3. What several checks need is an `async def` of the `Context` as well, and they ask for it by
   ``context.probe(it)``: it runs once.
4. A line that cannot be well while another is wrong has its place in `causes.CAUSES`.
5. tests/doctor/test_examine.py breaks a good node in one way at a time; docs/doctor.md lists every
   line.
"""
