"""Text: reading, tokenization, batching, generation."""
