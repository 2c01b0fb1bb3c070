"""Load generation, simulation and traces: what users of a server run (commands)."""
