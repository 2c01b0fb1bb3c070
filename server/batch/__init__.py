"""Files of requests, answered line by line: `tokenyard run-batch`."""
