"""Nodes that Ray places (commands, nodes)."""
