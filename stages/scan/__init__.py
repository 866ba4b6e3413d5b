"""scan: statistics of every neuron on text."""
