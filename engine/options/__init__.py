"""Options as operators write them, and the configuration that they resolve to (API and engine process)."""
