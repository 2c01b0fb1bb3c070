"""Number of replicas over time, in the process of `tokenyard simulate`."""
