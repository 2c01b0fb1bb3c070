"""POST /v1/completions (API process)."""
