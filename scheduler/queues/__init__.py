"""Running and waiting requests: their order, fairness between tenants, deadlines (engine process)."""
