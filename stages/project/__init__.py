"""project → checkpoint: gradients and behaviour of the dense model, bent into the experts."""
