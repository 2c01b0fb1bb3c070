"""Drafts for the next step: proposers, and the drafts of each row (engine process)."""
