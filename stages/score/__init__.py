"""Importance scores of neurons: S_p, and simple measures for comparison."""
