"""POST /v1/chat/completions: conversations, with tools and reasoning in their replies (API process)."""
