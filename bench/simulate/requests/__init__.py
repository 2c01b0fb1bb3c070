"""Requests of a simulation: drawn from a seed, or read from a file, also one that others published.

Each yields `SimRequest`, in the order of arrival.
"""
