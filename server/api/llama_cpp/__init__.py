"""The part of llama.cpp's API that editors ask for: texts, holes in them, properties (API process)."""
