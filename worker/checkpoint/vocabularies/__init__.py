"""Tokenizers of files in other forms than tokenizer.json, made into its form (API and engine process).

Never: encodes a text, or runs code that comes with a checkpoint.
"""
