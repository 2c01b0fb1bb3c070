"""Measuring campaigns behind the figures in docs/benchmarks/: run by hand, not installed (commands).

Never: is imported by what is installed.
"""
