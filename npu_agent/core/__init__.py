"""Values and decisions: the standard library only, no I/O, no clock, no event loop."""
