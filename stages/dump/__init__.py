"""Tensors of attention and Linear layers, dumped while the dense model reads text."""
