"""train: continued pretraining of the carved model."""
