"""Tokens a second that one API process can stream, without a model behind it.

cli.py ──▶ launcher.py   `tokenyard serve`, whose engine process is
│        └──▶ stand_in.py   one token for each stream, every so often
└──▶ reader.py    all clients; counts and times what arrives
"""
