"""Drafts: guesses at the next tokens of running sequences, kept until a plan verifies them (engine process).

Owns: which there are, how many are worth their time, and what is known of their rates and costs.
"""
