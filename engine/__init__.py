"""The engine: AsyncEngine for the server, and the engine process behind it (API and engine process).

The modules in this folder itself are shared by both processes and the server: types, errors, messages, the
journal. `frontend`, `text` and `processes` load in the API process, `core` in the engine process alone.
"""
