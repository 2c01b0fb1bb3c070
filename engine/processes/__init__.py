"""Child processes: started, watched, replaced, ended; their transport (API and engine process).

Never: knows requests or plans.
"""
