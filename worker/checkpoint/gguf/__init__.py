"""GGUF files as checkpoint folders: header, metadata, tokenizer, without torch (API and engine process)."""
