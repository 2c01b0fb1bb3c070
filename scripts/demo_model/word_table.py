"""Tables of words written as running text.

Owns: the two separators, blanks for words and bars for phrases.
"""


def words(text: str) -> tuple[str, ...]:
    """Split at blanks: "red blue" is ("red", "blue")."""
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    """Split at bars: "good day|hello" is ("good day", "hello"). No phrase runs over a line's end."""
    return tuple(phrase.strip() for phrase in text.split("|"))
