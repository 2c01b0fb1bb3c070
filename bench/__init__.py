"""Load generation and measurements. Talks to a server over HTTP like any other client."""
