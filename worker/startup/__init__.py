"""From a configuration to a worker that is ready: load, measure, allocate, try (engine process).

Never: runs a plan.
"""
