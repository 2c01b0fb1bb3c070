"""The engine's own scheduler in virtual time: what happens if there is more load, memory, or another policy.

arrivals.py   which requests come when                 lengths.py    how long they are
simulate_run.py        the order of events in virtual time      replica.py    one scheduler and its model
fitted_step_time.py  how long a step takes, given or fitted   router.py     which replica takes a request
tally.py      what was measured                        setup.py      what is simulated, by name
report.py     the numbers side by side                 plots.py      the same as pictures
"""
