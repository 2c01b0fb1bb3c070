"""Pictures of requests: checked, prepared in a process of their own, placed in prompts (API process)."""
