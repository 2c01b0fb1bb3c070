"""Files and batches, which outlive the process: /v1/files and /v1/batches (API process).

Never: sends the requests of a batch (server/command/batch/batch_queue.py).
"""
