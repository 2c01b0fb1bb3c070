"""`tokenyard serve` from a checked configuration to its exit code: engine, HTTP, banner (API process)."""
