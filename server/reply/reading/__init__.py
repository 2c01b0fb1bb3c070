"""Text of a model, read as thoughts, content and calls: one machine and rows of data (API process).

Owns: the rows of all ways of writing, and the reader that they steer.
Never: ids of calls, HTTP, which tools there are (chat/tool_use.py), or an exception: all that a model
writes is a thought, content, or a call.
Pure: fed with text in pieces of any size. The events, joined, are the same for every cut.
"""
