"""Several models behind one address: their names, their engines and the memory of each (API process)."""
