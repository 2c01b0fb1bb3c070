"""Pauses of a neighbour's stream beside the dearest requests that are let in, and their places (commands).

cli.py         the server, the rounds, their table, the exit status
crowds.py      the requests that others send, again and again
neighbour.py   the stream, read by a process that does nothing else
places.py      what each process did in a pause
verdict.py     whether the pauses break what is promised
"""
