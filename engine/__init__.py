"""One loop that owns everything alive, and the face it shows to the server.

`AsyncEngine` lives in the API process; the scheduler and the worker live in the engine process.
"""
