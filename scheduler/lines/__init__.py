"""The running and the waiting line: order, fairness between tenants, deadlines (engine process).

Never: counts blocks.
"""
