"""evaluate: compare the carve, the dense model and baselines on held-out text."""
