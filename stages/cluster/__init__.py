"""Which neuron belongs to which expert."""
