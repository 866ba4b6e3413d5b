"""extract: copy the neurons of every expert out of the dense checkpoint."""
