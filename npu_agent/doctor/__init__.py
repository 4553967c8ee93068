"""`npu-agent doctor`: whether all that the agent needs is there, on this host and in this cluster.

`examine` runs everything; each subject is a module of its own. What reads a subject's part of the
host stands beside what judges it, and nothing here changes anything.

A line of the report is an `async def` that returns a `Finding`: `ok`, `note`, `unused`, `unknown`
or `wrong`, each with what was found, the remedy and, where it is wrong, a command. To add one:

1. Write it into the module of its subject, and `yield` its name and itself in `lines` there, at the
   place where people should read it. A new subject is a module with `lines`, and its line in
   `examine.SUBJECTS`.
2. What may block goes through `probe`, which has a deadline and a thread of its own. Where a value
   cannot be seen, raise `Unseen`: the line is then unknown, and says why.
3. What several lines need to see is an `async def` of the `Situation`, too, and they ask for it by
   ``here.see(it)``: it runs once, at the same time as all others.
4. A line that cannot be well while another is wrong has its place in `causes.CAUSES`: it is folded.
5. tests/doctor/test_examine.py breaks a good node in one way at a time; docs/doctor.md lists every
   line.
"""
