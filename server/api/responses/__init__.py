"""POST /v1/responses, and the store of responses (API process).

Never: reads the reply of a model by itself: chat does.
"""
