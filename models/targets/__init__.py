"""MoE architectures in which a carve can be written."""
