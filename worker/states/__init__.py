"""States of recurrent layers: their shape, their place in blocks, their recurrences (engine process)."""
