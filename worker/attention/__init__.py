"""Paged attention: the interface, the cache's layout, the reference in plain torch (engine process)."""
