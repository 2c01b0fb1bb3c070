"""Access: API keys, TLS certificates, origins of pages, a limit on memory (API process)."""
