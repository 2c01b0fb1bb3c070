"""Anthropic's Messages API: its bodies, its events and its errors (API process).

Never: reads the reply of a model by itself: chat does.
"""
