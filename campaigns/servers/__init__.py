"""Servers as campaigns see them from outside: started, read in /proc and /metrics, ended (commands).

Never: measures anything; each campaign does.
"""
