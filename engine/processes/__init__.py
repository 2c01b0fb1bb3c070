"""Child processes: started, watched, replaced and ended, and the transport to them (API process, engine process).

Never: knows requests or plans.
"""
