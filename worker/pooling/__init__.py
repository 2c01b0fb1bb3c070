"""Steps that turn prompts into vectors or scores (engine process).

Never: generates tokens.
"""
