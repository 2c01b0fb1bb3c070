"""The parts that all generating endpoints share: fields, engine requests, replies, streams (API process)."""
