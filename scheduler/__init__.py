"""Pure decisions: which sequence computes how many tokens in the next step, in which blocks (engine process).

messages.py, config.py, policy.py, prefix_keys.py, tenant_ledger.py and routing load in the API process too.
Standard library only. No clock, no randomness, no I/O: time comes in as an argument, so that every decision
can be tested, replayed and simulated.
"""
