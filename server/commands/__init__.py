"""The command `tokenyard`: its subcommands, and what `serve` prints (API process and commands).

Never: speaks HTTP by itself.
"""
