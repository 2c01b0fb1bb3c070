"""States of recurrent layers: their shape, their place in blocks, their recurrences (engine process).

Never: keys and values (worker/attention), or which block belongs to whom (scheduler/).
"""
