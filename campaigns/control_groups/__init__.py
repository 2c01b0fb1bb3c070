"""A server in control groups of limited memory, under a real kernel in an emulated machine (commands).

guest_root.py      the guest's file system: this Python, what the server needs, these sources
emulator.py        the kernel, QEMU's command, and the lines that the guest writes
guest.py           the guest's first process
in_group.py        a process that enters a group, or holds memory there
memory_groups.py   the groups, of version 1 and 2
group_asking.py    requests, and how each ended
group_rounds.py    the rounds and their judgement
"""
