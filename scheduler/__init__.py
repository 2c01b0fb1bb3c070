"""Pure decisions: which sequence computes how many tokens in the next step, and in which KV blocks.

Standard library only. No clock, no randomness, no I/O: time comes in as an argument, so that every
decision can be tested, replayed and simulated.
"""
