"""Pictures in prompts: the tower of a model, and the rows that it makes of them (engine process).

Never: opens a picture's file, or says where in a prompt it stands.
"""
