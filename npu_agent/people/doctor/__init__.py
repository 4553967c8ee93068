"""`npu-agent doctor`: asks the running agent, and checks what needs no agent.

`agent` shows the problems that the running agent reports; they are judged nowhere else. The other
modules check what the agent needs, a subject each. `npu_agent.people.commands.doctor` runs them
all. Nothing here changes anything.

A line of the report is a check: an `async def` that takes the `Context` and returns a `Check`, made
by `ok`, `note`, `unused`, `unknown` or `wrong`. To add one:

1. Write it into the module of its subject, and yield its name and itself in `lines` there. A new
   subject has a row in `SUBJECTS` of the command.
2. What may block goes through `Context.in_thread`, which has a deadline. Where something cannot be
   seen, raise `Unknown` or let an ApiError pass: the line is then unknown, and says why.
3. What several checks need is an `async def` of the `Context` too: `context.probe(it)` runs it
   once.
4. tests/people/doctor/test_examine.py breaks a good node in one way at a time.
"""
