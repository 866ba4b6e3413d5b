"""What passes between stages: typed, versioned, checked when read."""
