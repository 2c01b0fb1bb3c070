"""Child processes: their start, watch, replacement and end; their transport (API and engine process)."""
