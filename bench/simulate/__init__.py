"""The engine's own scheduler in virtual time: more load, more memory or another policy (commands).

run.py      the order of events in virtual time      replica.py           one scheduler and its model
router.py   which replica takes a request            simulated_drafts.py  how often drafts are right
setup.py    what is simulated, by name               options.py           the words of the command line
tally.py    what was measured                        cells.py             parts of it in processes
report.py   the numbers side by side                 plots.py             the same as pictures
find.py     the fewest replicas, the highest load
requests/   which requests come when, and how long they are
fitting/    step times and overhead from a trace and a measured run
leaps/      steps in which nothing is decided, many at once
"""
