"""What is measured on outputs and routing."""
