"""How much each neuron matters: S_p, and plain measures to compare it with."""
