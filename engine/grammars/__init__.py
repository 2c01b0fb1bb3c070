"""Grammars from outside, compiled on trial in a process of their own (API process and its own).

Never: lets a grammar reach the engine that was not tried.
"""
