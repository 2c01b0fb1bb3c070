"""A checkpoint's files: found, checked and read, without torch (API and engine process)."""
