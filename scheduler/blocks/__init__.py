"""KV blocks: which are free, whose they are, and which prefixes they hold (engine process).

Never: orders requests.
"""
