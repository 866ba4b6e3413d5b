"""Pictures of what the stages found."""
