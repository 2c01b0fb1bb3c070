"""Access: API keys, TLS certificates, origins of pages, a limit on memory (API process).

Never: reads the body of a request.
"""
