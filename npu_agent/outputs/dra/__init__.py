"""DRA: the node's devices for ResourceClaims. `slices` publishes them."""
