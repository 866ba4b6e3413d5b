"""Find low-precision errors in models and tensors."""
