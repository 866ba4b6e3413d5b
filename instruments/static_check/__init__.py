"""Training code, read and not run: where it loses precision."""
