"""Routers of one layer: the task, ways to fit a router, and measures of its choices."""
