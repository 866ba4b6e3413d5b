"""Dense and MoE architectures, checkpoint files, experts and routing, the layer stream."""
