"""Check gradients, outputs and the loss scale of a training run at every step."""
