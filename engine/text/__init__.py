"""Text to token ids and back: tokenizer, chat template, detokenizer (API process).

Never: imports torch.
"""
