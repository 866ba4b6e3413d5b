"""scan → statistics: what every unit does on text."""
