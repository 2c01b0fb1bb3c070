"""The command `tokenyard`: its subcommands, and the output of `serve` (API process and commands).

Never: speaks HTTP by itself.
"""
