"""What the parameter-level scanner is made of: which weights, their norms, and the buffers of a pass."""
