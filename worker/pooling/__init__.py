"""Steps that turn prompts into vectors or scores (engine process)."""
