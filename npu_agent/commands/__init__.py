"""The commands, one module each: `main(args)` does it and returns the exit code.

`npu_agent.cli` parses the arguments and imports the module of the command that they name.
"""

FAILED = 1
"""Exit code of a command that was understood and could not be done, or found something wrong."""
