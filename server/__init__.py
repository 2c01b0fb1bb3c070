"""The OpenAI wire format and nothing else: validates, translates, replies."""
