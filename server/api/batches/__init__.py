"""Files and batches, which outlive the process: /v1/files, /v1/batches, and the work on them (API process).

Never: a command line (server/command/batch/).
"""
