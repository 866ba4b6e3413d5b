"""The .mscan file format: write, read, merge, show."""
