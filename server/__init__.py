"""HTTP: the endpoints of the server, and the command `tokenyard` (API process).

The modules beside this line hold all endpoints together: app, launch, errors, the OpenAPI document.
Never: imports the scheduler or the worker.
"""
