"""POST /v1/completions (API process).

Never: waits for tokens by itself.
"""
