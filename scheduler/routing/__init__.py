"""The line before several engines, and the choice of one for each request (API process and simulator).

Never: sends anything, or reads a clock; its caller reports to it about each engine.
"""
