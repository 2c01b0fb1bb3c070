"""Tensors and devices: loads a checkpoint, measures memory, executes a plan, returns tokens (engine process).

worker.py is its face. What the API process may load too imports no torch: worker_config.py,
worker_errors.py, doctor_findings.py, machine.py, memory_sizes.py and the folder checkpoint/.
"""
