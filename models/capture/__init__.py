"""Probes that read activations and gradients inside a running model."""
