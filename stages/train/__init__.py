"""train: continued pretraining, in which the routers learn to schedule the experts."""
