"""Pictures of requests: found in messages, fetched, placed in prompts (API process).

Never: decodes one: engine/media has a process for that.
"""
