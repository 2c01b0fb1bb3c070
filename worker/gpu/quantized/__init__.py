"""Products of a GPU by quantized weights, and the proof that they are exact (engine process)."""
