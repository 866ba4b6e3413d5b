"""Sizes of Megatron's model and batches in tests, apart from Megatron, which takes seconds to import."""

L, D, F, V, HEADS, GROUPS = 2, 24, 40, 62, 4, 2
B, T = 3, 8
