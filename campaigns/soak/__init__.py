"""A soak: everything that clients do, for as long as is asked, and a look at what is left behind (commands).

run.py       the server, samples of what it holds, the verdict
acts.py      the random mix of requests, each with the ends that it may have
streams.py   the other run: many streams at a time, each compared piece by piece
"""
