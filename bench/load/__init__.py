"""`tokenyard bench`: sends a workload to a server and reports what came back (commands).

Never: measures from inside a server.
"""
