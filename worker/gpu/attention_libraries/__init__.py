"""Attention by libraries that are not installed with us, on a GPU (engine process).

Never: takes a layer that its trial at load has not passed.
"""
