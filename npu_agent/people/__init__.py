"""What people's commands need, and the running agent never loads.

`commands` has a module for each command but `run`; `doctor` checks a host; `cluster` is the view of
`kubectl npu`; `simulator` makes cards for `simulate`, `demo` and the tests. The rest of `npu_agent`
imports nothing of it (import-linter), but for `npu_agent.cli`, which finds the command.
"""
