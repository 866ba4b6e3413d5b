"""scan → statistics: what every neuron does on text."""
