"""Runtime monitor: gradients, activations and the loss scale of a model that is being trained."""
