"""The border: sockets, HTTP, access, observation, and errors as replies (API process).

Never: knows what an endpoint means.
"""
