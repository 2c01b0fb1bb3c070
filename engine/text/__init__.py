"""Text to token ids and back: tokenizer, chat template, detokenizer (API process).

Never: needs torch, or blocks the event loop by itself.
"""
