"""GGUF files as checkpoint folders: header, metadata and tokenizer, without torch (API and engine process).

Never: reads tensors.
"""
