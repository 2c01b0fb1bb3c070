"""The engine process: its start, its loop, and the trace of its steps (engine process).

Never: knows texts, clients or HTTP.
"""
