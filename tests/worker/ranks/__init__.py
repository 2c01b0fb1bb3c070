"""Ranks: one model on several processes computes what it computes on one."""
