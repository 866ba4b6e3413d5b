"""Number formats under study: tensors rounded into them, in software."""
