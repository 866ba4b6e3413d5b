"""MoE architectures that a carve is written as."""
