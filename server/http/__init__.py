"""HTTP connections: limits, bodies, health probes, the state that every route holds (API process).

Never: knows what an endpoint means.
"""
