"""`tokenyard run-batch`: files of requests, answered line by line (commands)."""
