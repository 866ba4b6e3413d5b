"""Norms of every weight's input and gradient, by sample and block."""
