"""One step: budget, shares, admission, preemption, and its rollback (engine process).

Never: computes anything, or reads a clock.
"""
