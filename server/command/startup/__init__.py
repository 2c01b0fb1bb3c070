"""`tokenyard serve` from a checked configuration to the exit code: engine, HTTP server, banner (API process).

Never: knows endpoints (server/endpoints.py).
"""
