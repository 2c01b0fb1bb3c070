"""Ollama's API: its bodies, its lines of JSON and its errors (API process).

Never: loads, pulls or removes a model; one is served from start to end.
"""
