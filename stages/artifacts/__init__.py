"""What passes between stages, and between the processes of one."""
