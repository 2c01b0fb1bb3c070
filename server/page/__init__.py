"""The web page: a chat, a live view of the scheduler, facts of the server (API process).

Owns: the page's files in web/, and the routes that only it and `tokenyard top` read.
Never: a request to another server, or a build step: the files are served as they are.
"""
