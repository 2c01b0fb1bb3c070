"""Products of a GPU by quantized weights, and the proof that they are exact (engine process).

Never: reads checkpoints, or decides which layers are replaced.
"""
