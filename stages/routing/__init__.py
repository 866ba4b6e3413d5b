"""Routers of one layer: what they are fitted on, ways to fit them, and how they spread tokens."""
