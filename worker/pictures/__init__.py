"""Pictures in prompts: the tower of a model, and the rows that it makes of them (engine process)."""
