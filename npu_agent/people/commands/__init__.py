"""A module for each command but `run`: `main(args)` runs it and returns the exit code.

`catalogue` has their help and options, and `npu_agent.cli.main` imports the one that
the arguments name.
"""
