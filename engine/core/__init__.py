"""The engine process: its start, its loop, and the trace of its steps (engine process)."""
