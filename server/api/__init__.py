"""The protocols: a folder for each family of endpoints (API process)."""
