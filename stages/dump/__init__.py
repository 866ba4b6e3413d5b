"""Dump of tensors of attention and Linear layers from the dense model on text."""
