"""Routers of one layer: tasks, ways to fit them, and how they distribute tokens."""
