"""`tokenyard chat` and `tokenyard complete`: clients for a person at a terminal (commands)."""
