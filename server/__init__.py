"""HTTP: the endpoints of the server, and the command `tokenyard` (API process).

The modules of this folder hold all endpoints together: the application, their list, the OpenAPI document.
"""
