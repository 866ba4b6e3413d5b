"""What a tensor loses in low precision."""
