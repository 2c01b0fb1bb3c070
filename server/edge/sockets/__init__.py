"""Sockets of clients before there is HTTP: accepted, counted, shaken hands with (API process).

Also: refusals before a connection, clients that closed their half, the end of a connection, and the memory
that large requests leave.
Never: reads a byte of a request that is not refused.
"""
