"""Requests to the engine, and replies as they are read, for all generating endpoints (API process)."""
