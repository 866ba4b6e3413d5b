"""Tensor dump: what attention and Linear layers really compute, on disk, named and indexed."""
