"""Checks for low-precision errors in a model, a tensor or training code."""
