"""Paged attention: the interface, the cache's layout, the reference in plain torch (engine process).

Never: knows a device's kernels.
"""
