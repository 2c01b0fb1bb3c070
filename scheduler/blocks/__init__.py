"""KV blocks: which are free, which sequences hold them, and which prefixes are in them (engine process)."""
