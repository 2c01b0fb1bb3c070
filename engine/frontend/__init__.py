"""AsyncEngine: requests between their admission and their end, health and metrics (API process).

Never: plans a step, or loads the engine's core.
"""
