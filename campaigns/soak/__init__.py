"""A soak: everything that clients do, for as long as is asked, and a look at what is left behind (commands).

run.py       the server, samples of what it holds, the verdict
acts.py      the random mix of requests, each with the ends that it may have
lasting.py   batches and responses in the background, which outlive the request that began them
features.py  adapters that come and go, and pictures
trouble.py   processes that are killed and stopped, a full disk, no descriptors, no memory, a clock that jumps
attacks.py   attackers beside the clients
streams.py   the other run: many streams at a time, each compared piece by piece
"""
