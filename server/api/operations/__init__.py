"""The endpoints for operators and tools: health, metrics, models, admin, tokenization (API process)."""
