"""Grammars from outside, compiled on trial in a process of their own (API and grammar process).

Never: lets a grammar reach the engine that was not tried.
"""
