"""Files that stages exchange, and communication between the processes of a stage."""
