"""Client grammars, compiled on trial in a process of their own (API process and its own).

Never: lets an untried grammar reach the engine process.
"""
