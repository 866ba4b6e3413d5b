"""Architecture as data: dense families, MoE targets, and the way from one to the other."""
