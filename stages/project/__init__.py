"""project: fit the experts to the dense model's outputs and gradients, and write the checkpoint."""
