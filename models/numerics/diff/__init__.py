"""FP32 against low precision, module by module."""
