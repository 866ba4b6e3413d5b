"""Where low precision goes wrong: checks of models, tensors and training code, each usable alone."""
