"""Reports on all engines as one: live sequences, views and load (API process)."""
