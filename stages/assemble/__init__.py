"""assemble → checkpoint: experts behind a router."""
