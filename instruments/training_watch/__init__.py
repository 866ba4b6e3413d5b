"""Gradients, outputs and loss scale of a training, judged step by step."""
