"""Where a running scan keeps its sums."""
