"""Values that are planted to be looked for wherever something is said."""

from __future__ import annotations

# Each value is found by the same word or number, wherever it turns up.
WORD, NUMBER = "pLan" + "Ted", str(71717171)
VALUES = (WORD, f"it's {WORD} 'in' \"quotes\"", f"{WORD}\n{WORD} on\n\ttwo lines", f"\"{WORD}', '")


def leaks(text: str) -> bool:
    """Whether a planted value is in it."""
    return WORD in text or NUMBER in text
