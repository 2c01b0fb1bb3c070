"""The requests of a batch: their lines, their sending, and the batches of a running server (API process).

Never: a command line (server/command/batch/), or a route (server/api/files/).
"""
