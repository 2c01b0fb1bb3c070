"""POST /v1/chat/completions: the turn of a conversation, tools and reasoning in its reply (API process).

Never: waits for tokens by itself.
"""
