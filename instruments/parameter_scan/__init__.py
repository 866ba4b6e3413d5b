"""Norms of every weight's input and gradient, per sample and block."""
