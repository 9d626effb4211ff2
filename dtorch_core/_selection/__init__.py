"""What is installed, and which of it is chosen, and why."""
