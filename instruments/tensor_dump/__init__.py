"""Dump inputs, weights and gradients of a running model to disk."""
