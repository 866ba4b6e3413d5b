"""Inputs, weights and gradients of a running model, written to disk."""
