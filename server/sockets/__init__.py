"""Sockets of clients before there is HTTP: accepted, counted, shaken hands with (API process).

Never: reads or writes a byte of a request.
"""
