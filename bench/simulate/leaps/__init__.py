"""Leaps of a simulator over steps in which nothing is decided (the simulator's process).

Owns: a scheduler that sets steady decodes aside, and moves them on many steps at once.
"""
