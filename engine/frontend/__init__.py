"""AsyncEngine: requests between their admission and their end, health and metrics (API process)."""
