"""The log: the form of its lines, and the thread that writes them (every process).

Never: blocks the code that logs.
"""
