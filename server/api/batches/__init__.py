"""Files and batches, which outlive the process: /v1/files, /v1/batches, the work on them (API process)."""
