"""Running sums of a scan: in local files or in Redis."""
