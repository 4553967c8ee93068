"""Watching cards: threads in, a feed of Snapshots out."""
