"""HTTP connections: limits, bodies, health probes, the objects that every route uses (API process)."""
