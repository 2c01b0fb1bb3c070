"""Nodes that Ray places (commands, nodes).

Never: carries a plan or a token (engine/nodes/).
"""
