"""States of recurrent layers on a GPU: their kernels, and what calls these.

Never: which block belongs to whom (scheduler/), or the definition of a recurrence (worker/states/rules.py).
"""
