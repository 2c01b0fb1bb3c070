"""Text to token ids and back: tokenizer, chat template, detokenizer (API process and its own).

Never: imports torch.
"""
