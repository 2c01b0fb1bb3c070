"""The command `tokenyard`: its subcommands and their options (commands).

Never: speaks HTTP by itself.
"""
