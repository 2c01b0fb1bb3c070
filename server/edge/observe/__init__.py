"""Request ids, counts, traces and spans of HTTP requests (API process)."""
