"""HTTP connections: limits, bodies, health probes, the objects that every route uses (API process).

Never: knows what an endpoint means.
"""
