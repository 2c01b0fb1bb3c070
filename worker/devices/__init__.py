"""The device and the host's memory: allocation, copies, streams, ways to launch (engine process)."""
