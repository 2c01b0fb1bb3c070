"""Response templates: the way in which a checkpoint says that its replies are read (API process).

Owns: the template of `tokenizer_config.json`, its expressions, and the fields of a reply.
Never: HTTP, which tools there are (chat/tool_use.py), or backtracking: an expression of a checkpoint costs a
bounded number of steps a character, and a reply as a whole too.
Pure: fed with text in pieces of any size. The events, joined, are the same for every cut.
"""
