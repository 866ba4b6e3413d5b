"""Where low precision goes wrong in a model, a tensor or training code."""
