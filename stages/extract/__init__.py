"""extract: copy the units of every expert out of the dense checkpoint."""
