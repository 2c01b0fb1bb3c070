"""Load generation, simulation and measurements.

Talks to a server over HTTP like any other client; the simulator drives the scheduler itself.
"""
