"""The device and the host's memory: allocation, copies, streams (engine process).

Never: knows models or plans.
"""
