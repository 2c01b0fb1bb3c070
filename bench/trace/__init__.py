"""`tokenyard trace`: the steps of a server's scheduler, read and drawn (commands).

Never: asks a running server.
"""
