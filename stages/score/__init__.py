"""How much each neuron matters: S_p and the plain measures beside it."""
