"""assemble: fit a router per layer and write experts and routers as a checkpoint."""
