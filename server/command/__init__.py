"""The command `tokenyard`: its subcommands and their options (commands)."""
