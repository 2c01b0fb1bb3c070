"""Drafts: guesses at the next tokens of running sequences, kept until a plan verifies them (engine process).

Owns: the drafts that exist, how many are worth their time, and measurements of their rates and costs.
"""
