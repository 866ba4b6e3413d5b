"""evaluate → numbers a reader can trust."""
