"""Find precision faults in training code without running it."""
