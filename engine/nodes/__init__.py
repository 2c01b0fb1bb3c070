"""Ranks and nodes: plans on their way, links between machines, which may take part (engine process, nodes).

Owns: the one authenticated address over which machines compute the stages of one model.
"""
