"""Tool calls in generated text: a small state machine for each way to write them (API process).

Owns: where a call begins and ends, its name, its arguments as the model wrote them.
Never: ids of calls, HTTP, which tools there are (tool_use.py), or an exception: all that a model
writes is content, or a call.
Pure: fed with text in pieces of any size. The events, joined, are the same for every cut.
"""
