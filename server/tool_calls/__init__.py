"""Tool calls in generated text: one small state machine for each way in which models write them (API process).

Never: knows endpoints.
"""
