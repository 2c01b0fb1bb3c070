"""The log: the form of its lines, and the thread that writes them (every process).

Never: makes a caller wait for a reader.
"""
