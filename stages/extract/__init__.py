"""extract: copy the neurons of every expert from the dense checkpoint."""
