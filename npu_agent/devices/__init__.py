"""From the driver's files to an immutable Snapshot: model, families, reading, health, inventory."""
