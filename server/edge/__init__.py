"""The border: sockets, HTTP, access, observation, and errors as replies (API process)."""
