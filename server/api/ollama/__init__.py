"""Ollama's API: its bodies, its lines of JSON and its errors (API process)."""
