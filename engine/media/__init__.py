"""Pictures of requests: checked, prepared in a process of their own, placed in prompts (API process).

Never: fetches a picture (server/reply/pictures), or encodes one (the worker).
"""
