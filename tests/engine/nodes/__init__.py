"""Ranks and nodes: plans on their way, links, and who may take part."""
