"""Plan of one step, and what becomes of it: budget, admission, preemption, rollback (engine process)."""
