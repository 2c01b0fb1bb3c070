"""Tokenyard beside other servers: the same checkpoint, the same client, one machine, alternating rounds.

catalogue.py   the peers and how each is started           (servers/running.py: one process and its life)
workloads.py   what is sent, the same to everybody         bandwidth.py  how fast memory is read here
rounds.py      who is measured when                        floor.py      the time below which no step can be
results.py     what the rounds come to                     tables.py     as Markdown and as a picture
cli.py         the command line

The peers are programs of other people in environments of their own (the script `install` beside this file
makes them); nothing of theirs is imported.
"""
