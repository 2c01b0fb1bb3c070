"""How many tokens a step may have on a device that has run out of memory.

Owns: the limit. A step that finds too little memory halves it, and many that find enough double it again.
Never: what becomes of the step that did not fit (rollback.py).
"""

SMALLEST_CHUNK_TOKENS = 64
"""A sequence that is alone in its step and finds too little memory even for so few tokens is failed."""

# In a row. So a limit that is too high costs one step in a few hundred.
_STEPS_UNTIL_DOUBLED = 256


class StepLimit:
    """The operator's limit, until a step finds too little memory."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._num_that_fitted = 0
        self.max_tokens = most_tokens

    def fitted(self) -> None:
        """A step found enough memory."""
        if self.max_tokens == self._most_tokens:
            return
        self._num_that_fitted += 1
        if self._num_that_fitted >= _STEPS_UNTIL_DOUBLED:
            self._num_that_fitted = 0
            self.max_tokens = min(2 * self.max_tokens, self._most_tokens)

    def did_not_fit(self, num_tokens: int) -> None:
        """A step of so many tokens did not."""
        self._num_that_fitted = 0
        self.max_tokens = max(min(self.max_tokens, num_tokens) // 2, 1)
