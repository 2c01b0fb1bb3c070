"""The protocols: a folder for each family of endpoints (API process).

Never: reads or writes what a model says (server/reply/).
"""
