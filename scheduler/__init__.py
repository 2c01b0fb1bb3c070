"""Pure decisions: which sequence computes how many tokens in the next step, in which blocks (engine process).

messages.py, config.py and policy.py load in every process. Standard library only. No clock, no randomness, no
I/O: time comes in as an argument, so that every decision can be tested, replayed and simulated.
"""
