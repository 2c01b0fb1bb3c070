"""Load of a checkpoint: its kind, its files, the model that transformers builds of them (engine process)."""
