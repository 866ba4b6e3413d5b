"""The stages of the chain; they exchange only what `stages.artifacts` defines."""
