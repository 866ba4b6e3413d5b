"""Which unit belongs to which expert."""
