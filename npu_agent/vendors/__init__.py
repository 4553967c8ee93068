"""What the agent knows of vendors' hardware: one folder a vendor."""
