"""Clients for a person at a terminal: `tokenyard chat` and `tokenyard complete`."""
