"""States of recurrent layers on a GPU: their kernels, and what calls these (engine process)."""
