"""A simulation fitted to what a server did: step times from its trace, overhead from a measured run."""
