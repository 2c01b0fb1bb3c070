"""The command `tokenyard` and those of its subcommands that have no folder of their own (commands).

Never: speaks HTTP by itself.
"""
