"""Reports on all engines as one: live sequences, views, and the events of their prefix caches (API process).

Never: decides anything, or holds requests.
"""
