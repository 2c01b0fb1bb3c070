"""A checkpoint's files: found, checked and read, without torch (API process, engine process).

Never: loads weights.
"""
