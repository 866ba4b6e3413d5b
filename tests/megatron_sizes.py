"""Sizes of Megatron's model and batches in tests; a file of its own, since importing Megatron takes seconds."""

L, D, F, V, HEADS, GROUPS = 2, 24, 40, 62, 4, 2
B, T = 3, 8
