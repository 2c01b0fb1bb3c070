"""Products, attention and modules that a trial at load puts in the place of others (engine process).

Never: takes anything whose trial has not found it right.
"""
