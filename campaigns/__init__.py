"""Measuring campaigns behind the figures in docs/benchmarks/: run by hand, not installed (commands).

A file or folder is a campaign; `servers` and `checkpoints` serve several. README.md lists the commands.
Never: is imported by anything that is installed.
"""
