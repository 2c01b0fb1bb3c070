"""POST /v1/responses, and the store of responses (API process)."""
