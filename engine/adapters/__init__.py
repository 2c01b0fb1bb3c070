"""The adapters that requests may name, and how they come and go while the server runs (API process)."""
