"""The version of the extraction; it has no settings."""

VERSION = 4
