"""The stages of the chain; they meet only in `stages.artifacts`."""
