"""Anthropic's Messages API: its bodies, its events and its errors (API process)."""
