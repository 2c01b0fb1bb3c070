"""Clients that others wrote, in environments of their own, against a real server."""
