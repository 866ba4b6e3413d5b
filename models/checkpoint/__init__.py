"""Safetensors checkpoints: headers, a lazy reader, a streaming writer."""
