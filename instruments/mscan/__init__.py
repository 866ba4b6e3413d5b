"""The .mscan file format: written, read, merged, shown."""
