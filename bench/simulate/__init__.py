"""The engine's own scheduler in virtual time: more load, more memory or another policy (commands).

run.py      the order of events in virtual time      replica.py    one scheduler and its model
fitted_step_time.py  how long a step takes, given or fitted   router.py     which replica takes a request
report.py   the numbers side by side                 plots.py      the same as pictures
arrivals.py          which requests come when, how long       simulated_drafts.py   how often drafts are right
tally.py             what was measured                        setup.py      what is simulated, by name
measured_run.py      how far off a measured run               cells.py      parts of it in processes
leaps/               steps in which nothing is decided, many at once
"""
