"""`tokenyard chat`, `complete` and `top`: clients for a person at a terminal (commands)."""
