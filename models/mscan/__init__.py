"""The .mscan file format: per-sequence norms of every weight and its blocks; SPECIFICATION.md describes it."""
