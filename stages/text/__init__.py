"""Text: read, tokenized, batched, generated."""
